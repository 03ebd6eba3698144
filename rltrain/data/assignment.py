"""Which destination replica gets which prompt group: a pure function, so that every rank computes the same answer."""

import torch
from torch import Tensor


def mini_batch_of(group_ids: Tensor, num_groups: int, num_mini_batches: int) -> Tensor:
    """[n] the mini-batch of each group: equal runs of consecutive group ids."""
    return group_ids * num_mini_batches // num_groups


def assign_groups(group_tokens: Tensor, num_replicas: int, num_mini_batches: int = 1) -> Tensor:
    """[groups] the data-parallel index of each group: per mini-batch, longest first to the least loaded replica.

    `group_tokens` [groups] tokens of every group of the step. Ties go to the lower id and index.
    """
    num_groups = len(group_tokens)
    mini_batch = mini_batch_of(torch.arange(num_groups), num_groups, num_mini_batches)
    replicas = torch.zeros(num_groups, dtype=torch.int64)
    for index in range(num_mini_batches):
        load = [0] * num_replicas
        members = torch.nonzero(mini_batch == index).flatten().tolist()
        for group in sorted(members, key=lambda g: (-int(group_tokens[g]), g)):
            lightest = load.index(min(load))
            replicas[group] = lightest
            load[lightest] += int(group_tokens[group])
    return replicas
