"""Supervised fine-tuning: mean negative log-likelihood of the response tokens."""

from torch import Tensor

from rltrain.algorithms.losses import GlobalCounts, LossFunction, LossOutput, masked_sum, token_weights
from rltrain.data.experience import Experience


def sft_loss() -> LossFunction:
    """Cross-entropy over response tokens, every response token of the mini-batch weighing the same."""

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor, counts: GlobalCounts) -> LossOutput:
        weights = token_weights(experience, counts, "token_mean", max_response_tokens=1)
        loss = masked_sum(-logprobs, weights)
        return LossOutput(loss=loss, sums={"entropy": masked_sum(entropy.detach(), weights)})

    return loss_function
