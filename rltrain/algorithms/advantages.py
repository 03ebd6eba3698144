"""Advantages of whole samples, by which each of their response tokens is trained."""

from collections.abc import Callable

import torch
from torch import Tensor

from rltrain.algorithms.groups import Groups
from rltrain.algorithms.losses import response_lengths, sample_index
from rltrain.data.experience import SIBLINGS_APART, Experience

Estimator = Callable[[Tensor, Groups], Tensor]
"""([members, ...] fp64 values, [members] groups) -> [members] fp64 advantages."""


def with_sample_advantages(
    experience: Experience, estimator: Estimator, *, of: str = "rewards", token_rewards: Tensor | None = None
) -> Experience:
    """`experience` with its samples' advantages on every response token, 0 elsewhere.

    The estimator gets the field `of`; every group must be whole. Of `token_rewards` [tokens], such as a KL penalty,
    a sample gets the sum beside its reward: with one advantage per sample, a penalty on every token and its sum on the
    sample are the same. A sample without a token in the response mask is no member of its group.
    """
    values = getattr(experience, of).double()
    index = sample_index(experience)
    if token_rewards is not None:
        values = values.index_add(0, index, token_rewards.double().masked_fill(~experience.response_mask, 0))
    members = response_lengths(experience) > 0
    episodes = experience.sample_ids[members] % SIBLINGS_APART if experience.has("sample_ids") else None
    per_sample = torch.zeros(experience.num_samples, dtype=torch.float64)
    if members.any():
        per_sample[members] = estimator(values[members], Groups.of(experience.group_ids[members], episodes))
    per_token = per_sample[index].masked_fill(~experience.response_mask, 0)
    return experience.with_fields(advantages=per_token.to(experience.rewards.dtype))
