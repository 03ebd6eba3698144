"""Which replica gets which prompt group, and which mini-batch which sample: pure functions of all there is."""

from heapq import heapreplace

import torch
from torch import Tensor


def assign_groups(group_tokens: Tensor, num_replicas: int, num_blocks: int = 1) -> Tensor:
    """[groups] the data-parallel index of each group: per block, longest first to the least loaded replica.

    `group_tokens` [groups] tokens of every group of a chunk; a block is a run of consecutive groups, so that every
    replica gets its share of each. Ties go to the lower id and index.
    """
    num_groups, tokens = len(group_tokens), group_tokens.tolist()
    replicas = [0] * num_groups
    for block in torch.arange(num_groups).tensor_split(num_blocks):
        loads = [(0, replica) for replica in range(num_replicas)]  # a heap: the lightest first
        for group in sorted(block.tolist(), key=lambda g: (-tokens[g], g)):
            load, lightest = loads[0]
            replicas[group] = lightest
            heapreplace(loads, (load + tokens[group], lightest))
    return torch.tensor(replicas, dtype=torch.int64)


def mini_batch_of(
    groups: Tensor, num_groups: int, samples_per_group: int, num_mini_batches: int, num_blocks: int
) -> Tensor:
    """[samples] the mini-batch of each sample: one of the equal parts, by their place in the group, of the samples of
    one of `num_blocks` equal runs of groups.

    With one block a mini-batch has samples of every group, which makes its gradient less noisy than all samples of a
    few groups would; with as many blocks as mini-batches it has all samples of some. `groups` [samples] are ascending
    numbers below `num_groups`. A group of more or fewer samples than `samples_per_group` is spread over the places of
    as many.
    """
    first = torch.searchsorted(groups, groups)
    sizes = torch.searchsorted(groups, groups, right=True) - first
    place_in_group = (torch.arange(len(groups)) - first) * samples_per_group // sizes
    part = place_in_group * (num_mini_batches // num_blocks) // samples_per_group
    return part * num_blocks + groups * num_blocks // num_groups
