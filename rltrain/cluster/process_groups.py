"""Process groups from explicit rank lists. The only module that makes any.

Every group of the job is made here, at start-up, in one global order. Equal rank lists share one communicator,
whichever role or purpose they come from.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import cast

import numpy as np
import torch.distributed as dist

from rltrain.cluster.grid import Grid
from rltrain.cluster.placement import format_ranks
from rltrain.config.roles import TRAINING_ROLES

RankList = tuple[int, ...]

WEIGHT_SYNC_PAIRS = (("actor", "rollout"),)


def model_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """The rank lists that a Megatron model on `grid` needs, under the field names of Megatron's ProcessGroupCollection.

    Every list is ascending. Embedding lists hold the pipeline stages that have a copy of the embeddings.
    """
    pipelines = grid.lists("pp")
    return {
        "tp": grid.lists("tp"),
        "pp": pipelines,
        "cp": grid.lists("cp"),
        "dp": grid.lists("dp"),
        "mp": grid.lists("tp", "pp"),
        "dp_cp": grid.lists("dp", "cp"),
        "tp_cp": grid.lists("tp", "cp"),
        "tp_dp_cp": grid.lists("tp", "dp", "cp"),
        "intra_dist_opt": (grid.ranks,),
        "embd": tuple(tuple(sorted({ranks[0], ranks[-1]})) for ranks in pipelines),
        "pos_embd": tuple(ranks[:1] for ranks in pipelines),
        **_expert_group_lists(grid),
    }


def group_lists(grids: Mapping[str, Grid], world_size: int | None = None) -> tuple[RankList, ...]:
    """Every rank list that the roles on `grids` need, once each, in the order in which all ranks make the groups.

    Per role: its ranks and its replicas; for a role whose model is Megatron's, its model groups. Per pair of roles
    between which weights are synced: the union of their ranks. For the exchange: all `world_size` ranks (None: all
    ranks that host a role).
    """
    lists: set[RankList] = set()
    for role, grid in grids.items():
        lists.add(grid.ranks)
        lists.update(grid.lists("pp", "cp", "tp"))
        if role in TRAINING_ROLES:
            lists.update(ranks for field in model_group_lists(grid).values() for ranks in field)
    for pair in WEIGHT_SYNC_PAIRS:
        if all(role in grids for role in pair):
            lists.add(_union(grids[role] for role in pair))
    lists.add(_union(grids.values()) if world_size is None else tuple(range(world_size)))
    return tuple(sorted(lists, key=lambda ranks: (len(ranks), ranks)))


class Groups(dict[RankList, dist.ProcessGroup]):
    """Rank list -> process group, for the lists that hold this rank."""

    def __missing__(self, ranks: RankList) -> dist.ProcessGroup:
        known = "; ".join(format_ranks(known) for known in self)
        raise KeyError(
            f"rank {dist.get_rank()} has no process group over ranks {format_ranks(ranks)}; it has: {known or 'none'}"
        )


class ProcessGroups:
    """This rank's groups: `groups[ranks]` on the compute backend, `groups.cpu[ranks]` over the same ranks on gloo.

    Where the backend is gloo both are the same group. A group's ranks are numbered in ascending world order.
    """

    def __init__(self, lists: Iterable[RankList], *, backend: str, timeout_s: float) -> None:
        """Make the groups. Collective over: all ranks, which give equal `lists` in equal order.

        All ranks make every call, since torch names a group by counting them; for a rank that is no member the call
        returns at once. With `use_local_synchronization` torch would name a group by how many groups a rank has
        already, which differs between the members of overlapping lists: they would wait for each other forever.
        """
        self.compute = Groups()
        self.cpu = self.compute if backend == "gloo" else Groups()
        timeout = timedelta(seconds=timeout_s)
        for ranks in lists:
            _check(ranks)
            self._make(self.compute, ranks, backend, timeout)
            if self.cpu is not self.compute:
                self._make(self.cpu, ranks, "gloo", timeout)

    def __getitem__(self, ranks: RankList) -> dist.ProcessGroup:
        return self.compute[ranks]

    @staticmethod
    def _make(groups: Groups, ranks: RankList, backend: str, timeout: timedelta) -> None:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            groups[ranks] = cast(dist.ProcessGroup, group)


def _check(ranks: RankList) -> None:
    if not ranks or list(ranks) != sorted(set(ranks)):
        raise ValueError(f"a process group needs ascending distinct ranks, got {ranks}")


def _union(grids: Iterable[Grid]) -> RankList:
    return tuple(sorted({rank for grid in grids for rank in grid.ranks}))


def _expert_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """Lists of the expert layers. ValueError where the grid's expert parallelism does not divide its ranks."""
    ranks = grid.expert_array
    pp, expert_dp, ep, tp = range(4)
    return {
        "ep": _lists_along(ranks, ep),
        "expt_tp": _lists_along(ranks, tp),
        "expt_dp": _lists_along(ranks, expert_dp),
        "tp_ep": _lists_along(ranks, ep, tp),
        "tp_ep_pp": _lists_along(ranks, pp, ep, tp),
    }


def _lists_along(ranks: np.ndarray, *axes: int) -> tuple[RankList, ...]:
    inner = [axis for axis in range(ranks.ndim) if axis in axes]
    outer = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = int(np.prod([ranks.shape[axis] for axis in inner]))
    return tuple(tuple(int(rank) for rank in row) for row in ranks.transpose(outer + inner).reshape(-1, size))
