"""Samples drawn by older weights than those being trained: how old they are, and what becomes of them.

Staleness of a token is the training step less the version of the policy that drew it.
"""

from typing import Literal

import torch
from torch import Tensor

from rltrain.algorithms.losses import sample_index
from rltrain.data.experience import Experience

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
