"""The rank lists over which the roles of a job need process groups. Pure: the same on every rank."""

from collections.abc import Iterable, Mapping

import numpy as np

from rltrain.cluster.grid import Grid
from rltrain.tasks.roles import SYNCED, model_roles

RankList = tuple[int, ...]

SYNCED_PAIRS = tuple(("actor", role) for role in SYNCED.values())


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
        **_shard_group_lists(grid),
    }


def group_lists(grids: Mapping[str, Grid]) -> tuple[RankList, ...]:
    """Every rank list that the roles on `grids` need, once each, in the order in which all ranks make the groups.

    Per role: its ranks and its replicas; for a role whose model is Megatron's, its model groups. Per pair of roles
    between which weights are synced: the union of their ranks.
    """
    lists = {ranks for of_roles in role_group_lists(grids).values() for ranks in of_roles}
    return tuple(sorted(lists, key=global_order))


def role_group_lists(grids: Mapping[str, Grid]) -> dict[frozenset[str], set[RankList]]:
    """Roles -> the rank lists that tasks use in which at least these take part."""
    lists: dict[frozenset[str], set[RankList]] = {}
    for role, grid in grids.items():
        own = lists[frozenset({role})] = {grid.ranks, *grid.lists("pp", "cp", "tp")}
        if role in model_roles():
            own.update(ranks for field in model_group_lists(grid).values() for ranks in field)
    for pair in SYNCED_PAIRS:
        if all(role in grids for role in pair):
            lists[frozenset(pair)] = {_union(grids[role] for role in pair)}
    return lists


def lists_of_task(roles: Iterable[str], grids: Mapping[str, Grid]) -> set[RankList]:
    """The rank lists that a task over `roles` may use; all of their members take part in it."""
    taking_part = frozenset(roles)
    return {ranks for users, lists in role_group_lists(grids).items() if users <= taking_part for ranks in lists}


def global_order(ranks: RankList) -> tuple[int, RankList]:
    """Sorts lists into the order in which all ranks make their groups."""
    return len(ranks), ranks


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


def _shard_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """Lists of a model that is sharded over all its ranks: of every copy, and of the ranks with equal shards."""
    if not grid.is_sharded:
        return {}
    return {"shard": _lists_along(grid.sharded_array, 1), "replicate": _lists_along(grid.sharded_array, 0)}


def _lists_along(ranks: np.ndarray, *axes: int) -> tuple[RankList, ...]:
    inner = [axis for axis in range(ranks.ndim) if axis in axes]
    outer = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = int(np.prod([ranks.shape[axis] for axis in inner]))
    return tuple(tuple(int(rank) for rank in row) for row in ranks.transpose(outer + inner).reshape(-1, size))
