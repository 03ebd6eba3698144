"""Responses that are too long: a penalty that grows with their length, and none of those that were cut in the loss.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.4.
"""

import torch
from torch import Tensor

from rltrain.algorithms.losses import response_lengths, sample_index
from rltrain.config import schema
from rltrain.data.experience import Experience


def overlong_penalties(experience: Experience, settings: schema.OverlongPenalty, max_response_tokens: int) -> Tensor:
    """[samples] fp64 at most 0, to be added to the rewards (equation 13):

        0                                            where |y| <= L - buffer
        factor ((L - buffer) - |y|) / buffer         where L - buffer < |y| <= L

    with L the most tokens that a response may have, and |y| the tokens from the first that was drawn on: what was
    observed between turns takes room too. 0 where nothing was drawn.
    """
    lengths = lengths_from_first_drawn(experience).double()
    excess = (lengths - (max_response_tokens - settings.buffer_tokens)).clamp(min=0, max=settings.buffer_tokens)
    return -settings.factor * excess / settings.buffer_tokens


def lengths_from_first_drawn(experience: Experience) -> Tensor:
    """[samples] int64 tokens from the first response token on; 0 where there is none."""
    num_before = torch.zeros(experience.num_samples, dtype=torch.int64)
    drawn = torch.zeros(experience.num_tokens + 1, dtype=torch.int64)
    drawn[1:] = experience.response_mask.cumsum(0)
    starts = experience.offsets()[:-1]
    index = sample_index(experience)
    is_before = drawn[1:] == drawn[starts][index]
    num_before = num_before.index_add(0, index, is_before.long())
    return experience.lengths - num_before


def without_truncated(experience: Experience) -> Experience:
    """`experience` with nothing of truncated samples in the response mask.

    To be called once advantages are made, in which they count: they are compared with, and not trained on.
    """
    cut = experience.truncated[sample_index(experience)]
    return experience.with_fields(response_mask=experience.response_mask & ~cut)


def num_truncated(experience: Experience) -> int:
    """Truncated samples with a response."""
    return int((experience.truncated & (response_lengths(experience) > 0)).sum())
