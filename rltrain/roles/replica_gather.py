"""What all replicas of a role have of something, on each of them."""

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.runtime.grid import Grid


def gathered(values: Tensor, grid: Grid, group: dist.ProcessGroup) -> Tensor:
    """[n] of all replicas in their order, of which each has `values`, as many as it likes, equal on its ranks and in
    host memory. Collective over: `group`, the ranks of `grid`."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in grid.ranks]
    dist.all_gather(sizes, torch.tensor([len(values)]), group=group)
    padded = values.new_zeros(max(map(int, sizes)))
    padded[: len(values)] = values
    of_ranks = [torch.empty_like(padded) for _ in grid.ranks]
    dist.all_gather(of_ranks, padded, group=group)
    owners = [dist.get_group_rank(group, owner) for owner in grid.owners()]
    return torch.cat([of_ranks[owner][: int(sizes[owner])] for owner in owners])
