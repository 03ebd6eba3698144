"""The policy loss of grpo and ppo: PPO's clipped surrogate, with importance weights, an entropy bonus and a KL term
where configured. The algorithms differ in where the advantages come from."""

import torch
from torch import Tensor

from rltrain.algorithms.correction import importance_weights
from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import LossFunction, LossOutput, masked_max, masked_sum, of_response, token_weights
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


def policy_loss(settings: schema.Loss, max_response_tokens: int) -> LossFunction:
    """The policy's loss function of one job. `max_response_tokens` is a divisor under normalization dr_grpo.

    The micro-batch needs advantages, actor_logprobs if settings.old_logprobs is "actor", and reference_logprobs if
    the loss holds a KL term.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        mask = experience.response_mask
        # Values outside the response must not reach exp: an infinity there turns a zero gradient into NaN.
        current = logprobs.masked_fill(~mask, 0)
        old = of_response(experience, f"{settings.old_logprobs}_logprobs")
        ratio = (current - old).exp()
        per_token, clip_binds = clipped_policy_loss(
            ratio, of_response(experience, "advantages"), clip_low=settings.clip_low, clip_high=settings.clip_high
        )
        token_means = {"ppo_kl": old - current, "pg_clipfrac": clip_binds.float(), "entropy": entropy}
        if settings.tis_clip is not None and settings.old_logprobs == "actor":
            importance, cut = importance_weights(experience, settings.tis_clip)
            per_token = per_token * importance
            token_means |= {"tis_weight": importance, "tis_clipped": cut.float()}
        weights = token_weights(experience, settings.normalization, max_response_tokens)
        loss = masked_sum(per_token, weights.factor)
        sums = {"pg_loss": loss}
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * masked_sum(entropy, weights.factor)
        if settings.kl.coef and settings.kl.where == "loss":
            reference = of_response(experience, "reference_logprobs")
            kl_loss = masked_sum(kl_estimate(current, reference, settings.kl.estimator), weights.factor)
            loss = loss + settings.kl.coef * kl_loss
            sums["kl_loss"] = kl_loss
        difference = (current - of_response(experience, "rollout_logprobs")).abs()
        token_means["train_rollout_logprob_abs_diff"] = difference
        if experience.has("reference_logprobs"):
            reference = of_response(experience, "reference_logprobs")
            token_means["reference_kl"] = kl_estimate(current, reference, "k3")
        return LossOutput(
            loss=loss,
            divisor=weights.divisor,
            sums={name: value.detach() for name, value in sums.items()},
            token_sums={name: masked_sum(values.detach(), mask.float()) for name, values in token_means.items()},
            maxima={
                "ratio_max": masked_max(ratio, mask),
                "train_rollout_logprob_abs_diff_max": masked_max(difference, mask),
            },
        )

    return loss_function
