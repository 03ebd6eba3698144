"""What a sample adds to the best of k samples of its group."""

from functools import cache
from math import comb

import torch
from torch import Tensor

from rltrain.algorithms.groups import Groups


def gains_of_best(rewards: Tensor, groups: Groups, k: int) -> Tensor:
    """[samples] fp64 mean over the sets of k episodes of its group that hold the sample's, of the set's best reward
    less that of the others.

    Trajectories of an episode share its mean reward and its gain. Of a group of fewer episodes all are taken; one
    that is alone has nothing to be compared with: 0.
    """
    of_episodes = groups.episode_means(rewards)
    gains = torch.zeros_like(of_episodes)
    for group in range(groups.num_groups):
        samples = torch.nonzero(groups.index == group).flatten()
        episodes, place = torch.unique(groups.episodes[samples], return_inverse=True)
        values = of_episodes.new_zeros(len(episodes)).index_put((place,), of_episodes[samples])
        ordered, order = values.sort()
        chances = second_chances(len(episodes), min(k, len(episodes)))
        of_ordered = (chances * (ordered[:, None] - ordered)).sum(1)
        gains[samples] = torch.zeros_like(values).index_put((order,), of_ordered)[place]
    return gains


@cache
def second_chances(size: int, k: int) -> Tensor:
    """[size, size] fp64 for places in ascending order: the chance that place j is the second best of a set of k places
    that holds place i, and i its best."""
    if k < 2:  # noqa: PLR2004 - a set of one has no second
        return torch.zeros(size, size, dtype=torch.float64)
    all_sets = comb(size - 1, k - 1)
    rows = [[comb(j, k - 2) / all_sets if j < i else 0.0 for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)
