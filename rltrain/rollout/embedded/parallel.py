"""Tensor parallelism of the embedded engine over an explicit group."""

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """This rank's place in a tensor-parallel group; no group means a group of one, without communication."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of `partial` over the ranks, in place. Collective over: the tensor-parallel group."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def least(self, number: int, device: torch.device) -> int:
        """Of the ranks' numbers. Collective over: the tensor-parallel group."""
        if self.size == 1:
            return number
        least = torch.tensor(number, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def all_gather_columns(self, shard: Tensor) -> Tensor:
        """[rows, size * columns]: the ranks' shards side by side. Collective over: the tensor-parallel group."""
        if self.size == 1:
            return shard
        rows, columns = shard.shape
        gathered = shard.new_empty(self.size * rows, columns)
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=self.group)
        return gathered.view(self.size, rows, columns).transpose(0, 1).reshape(rows, self.size * columns)


def local_token_ids(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Row numbers within a vocabulary shard that starts at `first`, and a mask of the tokens that lie outside it."""
    local = tokens - first
    outside = torch.logical_or(local < 0, local >= count)
    return local.masked_fill(outside, 0), outside
