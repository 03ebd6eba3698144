"""Process groups from explicit rank lists. The only module that makes any.

Every group of the job is made here, at start-up, in one global order, and every later generation of a group whose
communicator was released. Equal rank lists share one communicator, whichever role or purpose they come from.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import cast

import numpy as np
import torch.distributed as dist

from rltrain.cluster.grid import Grid
from rltrain.cluster.placement import format_ranks
from rltrain.cluster.reopenable_group import ReopenableGroup
from rltrain.config.roles import TRAINING_ROLES

RankList = tuple[int, ...]

_numbers = itertools.count()
"""All ranks make sets of groups in one order, so these tell them apart in the store."""

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
    lists = {ranks for of_roles in role_group_lists(grids).values() for ranks in of_roles}
    lists.add(_union(grids.values()) if world_size is None else tuple(range(world_size)))
    return tuple(sorted(lists, key=_order))


def role_group_lists(grids: Mapping[str, Grid]) -> dict[frozenset[str], set[RankList]]:
    """Roles -> the rank lists that tasks use in which at least these take part, but for the exchange's."""
    lists: dict[frozenset[str], set[RankList]] = {}
    for role, grid in grids.items():
        own = lists[frozenset({role})] = {grid.ranks, *grid.lists("pp", "cp", "tp")}
        if role in TRAINING_ROLES:
            own.update(ranks for field in model_group_lists(grid).values() for ranks in field)
    for pair in WEIGHT_SYNC_PAIRS:
        if all(role in grids for role in pair):
            lists[frozenset(pair)] = {_union(grids[role] for role in pair)}
    return lists


def lists_of_task(roles: Iterable[str], grids: Mapping[str, Grid]) -> set[RankList]:
    """The rank lists that a task over `roles` may use; all of their members take part in it."""
    taking_part = frozenset(roles)
    return {ranks for users, lists in role_group_lists(grids).items() if users <= taking_part for ranks in lists}


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

    def __init__(
        self,
        lists: Iterable[RankList],
        *,
        backend: str,
        timeout_s: float,
        reopenable: Collection[RankList] = (),
    ) -> None:
        """Make the groups. Collective over: all ranks, which give equal `lists` in equal order.

        The communicators of `reopenable` lists on the compute backend can be released and made again later.

        All ranks make every call, since torch names a group by counting them; for a rank that is no member the call
        returns at once. With `use_local_synchronization` torch would name a group by how many groups a rank has
        already, which differs between the members of overlapping lists: they would wait for each other forever.
        """
        self._number = next(_numbers)
        self._reopenable: dict[RankList, ReopenableGroup] = {}
        self.compute = Groups()
        self.cpu = self.compute if backend == "gloo" else Groups()
        timeout = timedelta(seconds=timeout_s)
        for ranks in lists:
            _check(ranks)
            if ranks in reopenable:
                self._make_reopenable(ranks, backend, timeout)
            else:
                self._make(self.compute, ranks, backend, timeout)
            if self.cpu is not self.compute:
                self._make(self.cpu, ranks, "gloo", timeout)

    def __getitem__(self, ranks: RankList) -> dist.ProcessGroup:
        return self.compute[ranks]

    @property
    def reopenable(self) -> tuple[RankList, ...]:
        """Those of this rank's groups whose communicators can be released."""
        return tuple(self._reopenable)

    def open(self, generations: Mapping[RankList, int]) -> None:
        """Have these generations of reopenable groups. Collective over: all members of each list, at one task.

        In the order in which all ranks make groups: in any other, members of overlapping lists could wait for each
        other forever.
        """
        for ranks in sorted(generations, key=_order):
            self._reopenable[ranks].open(generations[ranks])

    def close(self, lists: Iterable[RankList]) -> None:
        """Release the communicators of reopenable groups. Waits for nobody; their work must be done on the device."""
        for ranks in lists:
            self._reopenable[ranks].close()

    def _make_reopenable(self, ranks: RankList, backend: str, timeout: timedelta) -> None:
        if dist.get_rank() in ranks:
            name = f"ranks {format_ranks(ranks)} of set {self._number} on {backend}"
            group = ReopenableGroup(name, ranks, backend=backend, timeout=timeout)
            self.compute[ranks] = self._reopenable[ranks] = group

    @staticmethod
    def _make(groups: Groups, ranks: RankList, backend: str, timeout: timedelta) -> None:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            groups[ranks] = cast(dist.ProcessGroup, group)


def _order(ranks: RankList) -> tuple[int, RankList]:
    return len(ranks), ranks


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
