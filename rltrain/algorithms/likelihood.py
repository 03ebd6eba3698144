"""The loss of supervised fine-tuning: mean negative log-likelihood of the response tokens."""

from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput, masked_sum, token_weights
from rltrain.data.experience import Experience


def likelihood_loss() -> LossFunction:
    """Cross-entropy over response tokens, every response token of the mini-batch weighing the same.

    The entropy is left out where the model's evaluation has none.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor | None = None) -> LossOutput:
        weights = token_weights(experience, "token_mean")
        return LossOutput(
            loss=masked_sum(-logprobs, weights.factor),
            divisor=weights.divisor,
            token_sums={} if entropy is None else {"entropy": masked_sum(entropy.detach(), weights.factor)},
        )

    return loss_function
