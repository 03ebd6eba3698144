"""Off-policy correction: what tokens count for that other weights, or other arithmetic, drew than the actor's.

Of a token with probability pi under the actor at the step's start and mu under the engine that drew it the ratio is
pi / mu; of a sequence it is the product of its tokens' ratios, or their geometric mean.

    tis      weight min(max(ratio, low), high): truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your
             Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    mis      weight ratio, what lies outside [low, high] is left out: masked importance sampling (Liu et al. 2025, "When
             Speed Kills Stability")
    icepop   weight ratio within [low, high], 0 outside, where the token goes on counting in the divisor (Ling Team
             2025, "Every Step Evolves")
    mask     weight 1 within [low, high], what lies outside is left out

With loss.old_logprobs: actor the policy's ratio is of the present weights over pi, so that with tis this is decoupled
PPO (Hilton et al. 2022, "Batch size-invariance for policy optimization"; Fu et al. 2025, "AReaL"): mu is the behaviour
policy, pi the proximal one. With loss.old_logprobs: rollout pi is that of the present weights, and nothing is weighed.

Left out means: out of the response mask, so that a token counts in no sum and no divisor.

With loss.correction.normalize weights are divided by their mean, so that a step's size does not depend on how far all
of it is from the engine: self-normalized importance sampling (Owen 2013, "Monte Carlo theory, methods and examples",
section 9.2). The mean is over response tokens, or of weights of sequences over those; with mis over what the method
leaves in, and whatever else leaves tokens out comes after it.
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
    """What a micro-batch is trained on. No gradient."""

    experience: Experience
    """The response mask has what was not left out."""
    weights: Tensor | None
    """[tokens] fp32, of the policy loss; 0 outside that mask. None: there is no correction."""
    token_means: dict[str, Tensor]
    """[tokens] each, metrics that are means over the response tokens of the micro-batch as it was."""


def corrected(experience: Experience, logprobs: Tensor, settings: schema.Loss) -> Corrected:
    """`logprobs` [tokens] are those of the present weights. Needs rollout_logprobs, and actor_logprobs if
    settings.old_logprobs is "actor"; for opsm_delta the advantages, for normalize weight_means."""
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
    """[tokens] bool: what the masks and the estimated KL find. Both log-probs [tokens] are 0 outside the response."""
    found = torch.zeros_like(experience.response_mask)
    for bounds in correction.masks:
        found = found | ~within(experience, actor - drawn, bounds)
    if correction.reject_above is not None:
        estimate = sample_means(experience, kl_estimate(drawn, actor, correction.reject_by))
        found = found | ~(estimate.abs() <= correction.reject_above)
    return found


def within(experience: Experience, log_ratio: Tensor, bounds: schema.RatioMask) -> Tensor:
    """[tokens] bool: which a mask leaves in. `log_ratio` [tokens] is 0 outside the response."""
    ratio = ratios(experience, log_ratio, "token" if bounds.level == "every_token" else bounds.level)
    inside = (ratio >= bounds.low) & (ratio <= bounds.high)
    if bounds.level != "every_token":
        return inside
    outside = (~inside & experience.response_mask).to(ratio.dtype)
    return (sample_sums(experience, outside) == 0)[sample_index(experience)]


def ratios(experience: Experience, log_ratio: Tensor, level: schema.CorrectionLevel) -> Tensor:
    """[tokens] each token's own ratio or that of its sequence. `log_ratio` [tokens] is 0 outside the response."""
    if level == "sequence":
        log_ratio = sample_sums(experience, log_ratio)[sample_index(experience)]
    elif level == "geometric":
        log_ratio = sample_means(experience, log_ratio)
    return log_ratio.exp()


def weights_of(experience: Experience, log_ratio: Tensor, correction: schema.Correction) -> tuple[Tensor, Tensor]:
    """[tokens] what the method makes of the ratios, and bool which are within its bounds. `log_ratio` [tokens] is 0
    outside the response."""
    assert correction.high is not None, "without it there are no weights"
    ratio = ratios(experience, log_ratio, correction.level)
    inside = (ratio >= correction.low) & (ratio <= correction.high)
    if correction.method == "tis":
        return ratio.clamp(correction.low, correction.high), inside
    if correction.method == "mask":
        return inside.to(ratio.dtype), inside
    return ratio.masked_fill(~inside, 0), inside


def weight_sums(experience: Experience, present: Tensor | None, settings: schema.Loss) -> Tensor:
    """[2] fp64 sum and number of the weights that loss.correction.normalize takes the mean of; to be added up over
    ranks. `present` [tokens] are log-probs of the present weights, needed where settings.old_logprobs is "rollout"."""
    correction, mask = settings.correction, experience.response_mask
    actor = of_response(experience, "actor_logprobs") if present is None else present.masked_fill(~mask, 0)
    weights, inside = weights_of(experience, actor - of_response(experience, "rollout_logprobs"), correction)
    counted = (mask & inside if correction.method == "mis" else mask).double()
    if correction.level != "token":  # all tokens of a sequence have its weight
        counted = counted / response_lengths(experience).clamp(min=1)[sample_index(experience)]
    return torch.stack([(weights.double() * counted).sum(), counted.sum()])


def with_weight_mean(experience: Experience, sums: Tensor) -> Experience:
    """Its weights are to be divided by the mean that `sums` of `weight_sums` give; by 1 where that is 0."""
    total, number = sums.tolist()
    mean = total / number if total else 1.0
    return experience.with_fields(weight_means=torch.full((experience.num_samples,), mean))


def _weight_metrics(experience: Experience, weights: Tensor) -> dict[str, Tensor]:
    """Parts of the metrics that `summarize` makes of their means, and those that are means themselves."""
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
    """A mini-batch's metrics with the effective sample size ess = (sum w)^2 / (n sum w^2), a share of its n response
    tokens, and the share of rejected_sequences, in the place of the means that they are made of."""
    if "correctable_sequences" not in metrics:
        return dict(metrics)
    parts = ("tis_weight_square", "correctable_sequences")
    square, sequences = (metrics[name] for name in parts)
    return {name: value for name, value in metrics.items() if name not in parts} | {
        "ess": metrics["tis_weight"] ** 2 / square if square else 0.0,
        "rejected_sequences": metrics["rejected_sequences"] / sequences if sequences else 0.0,
    }


# Samples drawn by older weights than those being trained: how old they are, and what becomes of them.
#
# Staleness of a token is the training step less the version of the policy that drew it.

OnStale = Literal["drop", "mask", "correct"]


def token_staleness(experience: Experience, step: int) -> Tensor:
    """[tokens] int64 step - policy version of response tokens, 0 elsewhere."""
    return (step - experience.policy_version.long()).masked_fill(~experience.response_mask, 0)


def apply_staleness_limit(
    experience: Experience, step: int, limit: int, how: OnStale
) -> tuple[Experience, dict[str, int]]:
    """`experience` without what is staler than `limit`, and counts to be added up over ranks and parts of a step.

    drop takes samples with a token over the limit out of the response mask whole, mask takes out such tokens alone,
    correct leaves them in: their loss is to be weighed as loss.correction says. What is out of the mask counts
    nowhere, in a group's mean as little as in a loss; samples stay, so that no rank waits for one.

    Counts: stale_samples and stale_tokens are those over the limit (in samples that were dropped, the tokens over the
    limit alone); tokens, staleness_sum and staleness_max (to be combined by maximum) are of what is left to train on.
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
