"""Losses of a policy that learns from pairs, against a reference: DPO, its form for uncertain labels, and IPO."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rltrain.algorithms.losses import LossFunction, LossOutput, SharedLoss, response_lengths
from rltrain.algorithms.pairs import comparison, num_pairs, pair_shares, response_sums, sides
from rltrain.config import schema
from rltrain.data.experience import Experience


def preference_loss(log_ratio_difference: Tensor, settings: schema.Preference) -> Tensor:
    """[pairs] loss of h = log(p(chosen) / p_ref(chosen)) - log(p(rejected) / p_ref(rejected)), [pairs].

    sigmoid: -log sigmoid(beta h), Rafailov et al. 2023, "Direct Preference Optimization", equation 7; with the share e
    of labels taken to be wrong (label_smoothing) -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), Mitchell 2023,
    "A note on DPO with noisy preferences". ipo: (h - 1 / (2 beta))^2, Azar et al. 2023, "A General Theoretical Paradigm
    to Understand Learning from Human Preferences", equation 17.
    """
    if settings.loss == "ipo":
        return (log_ratio_difference - 1 / (2 * settings.beta)).square()
    logits, wrong = settings.beta * log_ratio_difference, settings.label_smoothing
    return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)


def direct_preference_loss(settings: schema.Preference) -> LossFunction:
    """(micro-batch of whole pairs, log-probs, ...) -> its mean over pairs, and what DPO takes for rewards: beta times
    the log-ratio of a response.

    With sft_coef comes that times the chosen response's mean negative log-prob per token, Pang et al. 2024, "Iterative
    Reasoning Preference Optimization", equation 1. The micro-batch needs reference_logprobs.
    """

    def loss_function(experience: Experience, logprobs: Tensor, *of_distributions: Tensor) -> LossOutput:
        # Long responses have large sums, of which the difference would be rounding.
        log_ratios = response_sums(experience, logprobs - experience.reference_logprobs)
        chosen, rejected = sides(experience, log_ratios)
        loss = preference_loss(chosen - rejected, settings).sum()
        sums = comparison(experience, settings.beta * log_ratios)
        chosen_logprobs, rejected_logprobs = sides(experience, response_sums(experience, logprobs))
        sums |= {"chosen_logprob": chosen_logprobs.detach().sum(), "rejected_logprob": rejected_logprobs.detach().sum()}
        if settings.sft_coef:
            lengths, _ = sides(experience, response_lengths(experience))
            sft_loss = -(chosen_logprobs / lengths.clamp(min=1)).sum()
            loss, sums["sft_loss"] = loss + settings.sft_coef * sft_loss, sft_loss.detach()
        return LossOutput(loss=loss, divisor=num_pairs(experience), sums=sums)

    return SharedLoss(loss_function, pair_shares)
