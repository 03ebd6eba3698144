"""Makes the groups of two differently parallel roles in one world and reduces over each."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import RankList, group_lists
from rltrain.runtime.process_groups import ProcessGroups

WORLD_SIZE = 6
GRIDS = {
    "actor": Grid((0, 2, 3, 5), tp=2, pp=2),
    "reference": Grid((0, 2, 3, 5), tp=2),
    "rollout": Grid((1, 2, 4, 5), tp=4),
    "reward": Grid((1, 5)),
}
"""Overlapping, non-contiguous grids. Ranks belong to different numbers of lists."""


def reduce_over(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Returns [sum of the members' world ranks, this rank's number in the group, the group's size]."""
    total = torch.tensor(rank)
    dist.all_reduce(total, group=group)
    return [int(total), dist.get_rank(group), dist.get_world_size(group)]


def refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except (KeyError, ValueError) as error:
        return str(error)
    return ""


def reduce_over_every_group(backends: list[str]) -> dict[str, object]:
    """Returns the results by backend, and under "refusals" the messages for invalid lists."""
    refusals = {str(ranks): refusal(partial(made, [ranks])) for ranks in ((1, 0), (0, 0))}
    return {**{backend: make_and_reduce(backend) for backend in backends}, "refusals": refusals}


def make_and_reduce(backend: str) -> dict[str, object]:
    lists = group_lists(GRIDS)
    groups = made(lists, backend)
    rank = dist.get_rank()
    mine = [ranks for ranks in lists if rank in ranks]
    foreign = next(ranks for ranks in lists if rank not in ranks)
    return {
        "compute": [[list(ranks), *reduce_over(groups[ranks], rank)] for ranks in mine],
        "cpu": [[list(ranks), *reduce_over(groups.cpu[ranks], rank)] for ranks in mine],
        "cpu_backends": sorted({dist.get_backend(groups.cpu[ranks]) for ranks in mine}),
        "num_distinct": len({id(group) for group in (*groups.compute.values(), *groups.cpu.values())}),
        "refusal": refusal(lambda: groups[foreign]),
    }


def made(lists: list[RankList], backend: str = "gloo") -> ProcessGroups:
    return ProcessGroups(lists, backend=backend, timeout_s=60.0)
