"""Off-policy correction: weights for tokens from other weights or other arithmetic than the actor's.

A token has probability pi under the actor at the start of the step, and mu under the engine. Its ratio is pi / mu. The
ratio of a sequence is the product of its tokens' ratios, or their geometric mean. The methods are:

- tis: weight min(max(ratio, low), high). Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your Efficient
  RL Framework Secretly Brings You Off-Policy RL Training").
- mis: weight ratio, with tokens outside [low, high] excluded. Masked importance sampling (Liu et al. 2025, "When Speed
  Kills Stability").
- icepop: weight ratio within [low, high], else 0. Tokens of weight 0 still count in the divisor (Ling Team 2025, "Every
  Step Evolves").
- mask: weight 1 within [low, high], with tokens outside excluded.

Excluded tokens leave the response mask, so they count in no sum and no divisor.

With loss.old_logprobs: actor, the ratio of the policy loss is present weights over pi. With tis this is decoupled PPO:
mu is the behaviour policy and pi the proximal one (Hilton et al. 2022, "Batch size-invariance for policy optimization";
Fu et al. 2025, "AReaL"). With loss.old_logprobs: rollout, pi is the probability under the present weights. The ratio of
the policy loss then corrects for the engine already, so only method mask or loss.policy: reinforce are allowed.

With loss.correction.normalize the weights are divided by their mean. The size of a step then does not depend on the
distance of the whole step from the engine. This is self-normalized importance sampling (Owen 2013, "Monte Carlo theory,
methods and examples", section 9.2). The mean is over response tokens, or over sequences for weights of sequences. With
mis it is over the tokens within [low, high]. Other exclusions come after the mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import of_response, response_lengths, sample_index, sample_means, sample_sums
from rltrain.config import schema
from rltrain.data.experience import Experience


@dataclass(frozen=True)
class Corrected:
    """The corrected micro-batch for training, without gradients."""

    experience: Experience
    """The micro-batch with excluded tokens removed from the response mask."""
    weights: Tensor | None
    """Weight of each token in the policy loss, fp32 [tokens], 0 outside the mask. None: no correction is configured."""
    token_means: dict[str, Tensor]
    """Metrics per token, [tokens] each. Their means are over the response tokens of the uncorrected micro-batch."""


def corrected(experience: Experience, logprobs: Tensor, settings: schema.Loss) -> Corrected:
    """Applies loss.correction to a micro-batch. `logprobs` [tokens] are those of the present weights.

    Needs rollout_logprobs, and actor_logprobs if settings.old_logprobs is "actor". opsm_delta needs advantages, and
    normalize needs weight_means.
    """
    correction = settings.correction
    if not is_asked_for(correction):
        return Corrected(experience, None, {})
    mask = experience.response_mask
    present, drawn = logprobs.detach().masked_fill(~mask, 0), of_response(experience, "rollout_logprobs")
    actor = of_response(experience, "actor_logprobs") if settings.old_logprobs == "actor" else present
    kept, weights, token_means = mask, mask.to(drawn.dtype), {}
    if correction.high is not None:
        weights, inside = weights_of(experience, actor - drawn, correction)
        token_means["tis_clipped"] = ~inside
        if correction.method in ("mis", "mask"):
            kept = kept & inside
    if correction.normalize is not None:
        mean = experience.weight_means[sample_index(experience)]
        weights = weights / mean
        token_means["tis_weight_mean"] = mean
    rejected = rejections(experience, actor, drawn, correction)
    if correction.rejected == "weight_0":
        weights = weights.masked_fill(rejected, 0)
    else:
        kept = kept & ~rejected
    if correction.opsm_delta is not None:
        far = sample_means(experience, drawn - present) > correction.opsm_delta
        weights = weights.masked_fill(far & (of_response(experience, "advantages") < 0), 0)
    weights = weights.masked_fill(~kept, 0)
    return Corrected(
        experience.with_fields(response_mask=kept), weights, token_means | _weight_metrics(experience, weights)
    )


def is_asked_for(correction: schema.Correction) -> bool:
    given = (correction.high, correction.reject_above, correction.opsm_delta)
    return bool(correction.masks) or any(value is not None for value in given)


def rejections(experience: Experience, actor: Tensor, drawn: Tensor, correction: schema.Correction) -> Tensor:
    """Returns a bool mask [tokens] of the tokens rejected by the masks and by the estimated KL.

    Both log-probs [tokens] are 0 outside the response.
    """
    found = torch.zeros_like(experience.response_mask)
    for bounds in correction.masks:
        found = found | ~within(experience, actor - drawn, bounds)
    if correction.reject_above is not None:
        estimate = sample_means(experience, kl_estimate(drawn, actor, correction.reject_by))
        found = found | ~(estimate.abs() <= correction.reject_above)
    return found


def within(experience: Experience, log_ratio: Tensor, bounds: schema.RatioMask) -> Tensor:
    """Returns a bool mask [tokens] of the tokens within `bounds`. `log_ratio` [tokens] is 0 outside the response."""
    ratio = ratios(experience, log_ratio, "token" if bounds.level == "every_token" else bounds.level)
    inside = (ratio >= bounds.low) & (ratio <= bounds.high)
    if bounds.level != "every_token":
        return inside
    outside = (~inside & experience.response_mask).to(ratio.dtype)
    return (sample_sums(experience, outside) == 0)[sample_index(experience)]


def ratios(experience: Experience, log_ratio: Tensor, level: schema.CorrectionLevel) -> Tensor:
    """Returns each token's own ratio or the ratio of its sequence, [tokens]. `log_ratio` [tokens] is 0 outside the
    response."""
    if level == "sequence":
        log_ratio = sample_sums(experience, log_ratio)[sample_index(experience)]
    elif level == "geometric":
        log_ratio = sample_means(experience, log_ratio)
    return log_ratio.exp()


def weights_of(experience: Experience, log_ratio: Tensor, correction: schema.Correction) -> tuple[Tensor, Tensor]:
    """Returns the weights of the configured method and a bool mask of the ratios within its bounds, [tokens] each.

    `log_ratio` [tokens] is 0 outside the response.
    """
    assert correction.high is not None, "without it there are no weights"
    ratio = ratios(experience, log_ratio, correction.level)
    inside = (ratio >= correction.low) & (ratio <= correction.high)
    if correction.method == "tis":
        return ratio.clamp(correction.low, correction.high), inside
    if correction.method == "mask":
        return inside.to(ratio.dtype), inside
    return ratio.masked_fill(~inside, 0), inside


def weight_sums(experience: Experience, present: Tensor | None, settings: schema.Loss) -> Tensor:
    """Returns sum and number of the weights for the mean of loss.correction.normalize, fp64 [2].

    The caller sums them over ranks. `present` [tokens] are log-probs of the present weights. They are required if
    settings.old_logprobs is "rollout".
    """
    correction, mask = settings.correction, experience.response_mask
    actor = of_response(experience, "actor_logprobs") if present is None else present.masked_fill(~mask, 0)
    weights, inside = weights_of(experience, actor - of_response(experience, "rollout_logprobs"), correction)
    counted = (mask & inside if correction.method == "mis" else mask).double()
    if correction.level != "token":  # all tokens of a sequence have its weight
        counted = counted / response_lengths(experience).clamp(min=1)[sample_index(experience)]
    return torch.stack([(weights.double() * counted).sum(), counted.sum()])


def with_weight_mean(experience: Experience, sums: Tensor) -> Experience:
    """Returns `experience` with the weights' mean from summed `weight_sums`, or 1 if their sum is 0."""
    total, number = sums.tolist()
    mean = total / number if total else 1.0
    return experience.with_fields(weight_means=torch.full((experience.num_samples,), mean))


def _weight_metrics(experience: Experience, weights: Tensor) -> dict[str, Tensor]:
    """Returns the parts of the metrics for `summarize`, and metrics used as plain means."""
    lengths = response_lengths(experience)
    used = sample_sums(experience, ((weights != 0) & experience.response_mask).to(weights.dtype))
    of_token = sample_index(experience)
    one_of = 1 / lengths.clamp(min=1)  # sums to 1 over a sequence
    return {
        "tis_weight": weights,
        "tis_weight_square": weights.square(),
        "rejected_tokens": weights == 0,
        "rejected_sequences": (one_of * (used == 0))[of_token],
        "correctable_sequences": one_of[of_token],
    }


def summarize(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns a mini-batch's metrics with ess and rejected_sequences in place of their parts.

    ess is the effective sample size (sum w)^2 / (n sum w^2), a share of the n response tokens. rejected_sequences is a
    share of the sequences.
    """
    if "correctable_sequences" not in metrics:
        return dict(metrics)
    parts = ("tis_weight_square", "correctable_sequences")
    square, sequences = (metrics[name] for name in parts)
    return {name: value for name, value in metrics.items() if name not in parts} | {
        "ess": metrics["tis_weight"] ** 2 / square if square else 0.0,
        "rejected_sequences": metrics["rejected_sequences"] / sequences if sequences else 0.0,
    }


# Stale samples: their age, and their treatment.
#
# The staleness of a token is the training step minus the version of its policy.

OnStale = Literal["drop", "mask", "correct"]


def token_staleness(experience: Experience, step: int) -> Tensor:
    """Returns step - policy version of response tokens, and 0 elsewhere, int64 [tokens]."""
    return (step - experience.policy_version.long()).masked_fill(~experience.response_mask, 0)


def apply_staleness_limit(
    experience: Experience, step: int, limit: int, how: OnStale
) -> tuple[Experience, dict[str, int]]:
    """Returns `experience` without stale tokens, and counts. The caller sums the counts over ranks and parts of a step.

    - drop removes every sample with a token over the limit from the response mask.
    - mask removes only the tokens over the limit.
    - correct removes nothing: loss.correction weighs the stale tokens.

    Removed tokens count neither in a group's mean nor in a loss. The samples themselves stay, so no rank waits for a
    missing sample.

    The counts stale_samples and stale_tokens are those over the limit. A dropped sample adds only its tokens over the
    limit. tokens, staleness_sum and staleness_max describe the remaining tokens. Combine staleness_max by maximum.
    """
    stale = token_staleness(experience, step) > limit
    of_sample = sample_index(experience)
    stale_samples = torch.zeros(experience.num_samples, dtype=torch.bool, device=stale.device)
    stale_samples[of_sample[stale]] = True
    removed = {"drop": stale_samples[of_sample], "mask": stale, "correct": torch.zeros_like(stale)}[how]
    kept = experience.with_fields(response_mask=experience.response_mask & ~removed)
    staleness = token_staleness(kept, step)
    counts = {
        "stale_samples": int(stale_samples.sum()),
        "stale_tokens": int(stale.sum()),
        "tokens": int(kept.response_mask.sum()),
        "staleness_sum": int(staleness.sum()),
        "staleness_max": int(staleness.max()) if experience.num_tokens else 0,
    }
    return kept, counts
