"""Rewards less those of the greedy responses to the same prompts."""

import torch
from torch import Tensor

from rltrain.data.experience import Experience


def less_greedy_rewards(experience: Experience, greedy: Tensor) -> Experience:
    """The samples that are not `greedy` [samples] bool, their rewards less the mean of the greedy ones' of their group.

    ValueError where a group has none.
    """
    groups, index = torch.unique(experience.group_ids, return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64)
    counts = zeros.index_add(0, index[greedy], torch.ones_like(zeros[index[greedy]]))
    if (counts == 0).any():
        raise ValueError(f"no greedy sample in the groups {groups[counts == 0].tolist()}; expected one in each")
    baselines = zeros.index_add(0, index[greedy], experience.rewards[greedy].double()) / counts
    rewards = (experience.rewards.double() - baselines[index]).to(experience.rewards.dtype)
    return experience.with_fields(rewards=rewards).select(torch.nonzero(~greedy).flatten())
