"""GRPO's policy loss: the clipped surrogate of PPO, with an entropy bonus and a KL term where configured."""

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import GlobalCounts, LossFunction, LossOutput, masked_max, masked_sum, token_weights
from rltrain.config import schema
from rltrain.data.experience import Experience


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token loss -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and where the clip binds (bool).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; separate bounds as in DAPO
    (Yu et al. 2025, equation 10).
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()


def grpo_loss(settings: schema.Loss, max_response_tokens: int) -> LossFunction:
    """The loss function of one job. `max_response_tokens` is the divisor of normalization dr_grpo.

    The micro-batch needs advantages, actor_logprobs if settings.old_logprobs is "actor", and reference_logprobs if
    the loss holds a KL term.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor, counts: GlobalCounts) -> LossOutput:
        mask = experience.response_mask
        # Values outside the response must not reach exp: an infinity there turns a zero gradient into NaN.
        current = logprobs.masked_fill(~mask, 0)
        old = _of_response(experience, f"{settings.old_logprobs}_logprobs")
        ratio = (current - old).exp()
        policy_loss, clip_binds = clipped_policy_loss(
            ratio, _of_response(experience, "advantages"), clip_low=settings.clip_low, clip_high=settings.clip_high
        )
        weights = token_weights(experience, counts, settings.normalization, max_response_tokens)
        loss = masked_sum(policy_loss, weights)
        sums = {"pg_loss": loss.detach()}
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * masked_sum(entropy, weights)
        if settings.kl.coef and settings.kl.where == "loss":
            reference = _of_response(experience, "reference_logprobs")
            kl_loss = masked_sum(kl_estimate(current, reference, settings.kl.estimator), weights)
            loss = loss + settings.kl.coef * kl_loss
            sums["kl_loss"] = kl_loss.detach()
        difference = (current.detach() - _of_response(experience, "rollout_logprobs")).abs()
        token_means = {
            "ppo_kl": old - current.detach(),
            "pg_clipfrac": clip_binds.float(),
            "entropy": entropy.detach(),
            "train_rollout_logprob_abs_diff": difference,
        }
        if experience.reference_logprobs is not None:
            reference = _of_response(experience, "reference_logprobs")
            token_means["reference_kl"] = kl_estimate(current.detach(), reference, "k3")
        per_token = token_weights(experience, counts, "token_mean", max_response_tokens)
        sums |= {name: masked_sum(values, per_token) for name, values in token_means.items()}
        maxima = {
            "ratio_max": masked_max(ratio, mask),
            "train_rollout_logprob_abs_diff_max": masked_max(difference, mask),
        }
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    return loss_function


def _of_response(experience: Experience, name: str) -> Tensor:
    """[tokens] the named field, 0 outside the response."""
    values = getattr(experience, name)
    if not isinstance(values, Tensor):
        raise ValueError(f"the GRPO loss needs {name}; present: {experience.present()}")
    return values.masked_fill(~experience.response_mask, 0)
