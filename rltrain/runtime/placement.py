"""Placement: the ranks of every role, and the rank lists for which roles need process groups."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rltrain.config.schema import Config
from rltrain.config.section import role_names, split_roles
from rltrain.errors import PlacementError
from rltrain.runtime.grid import Grid, lists_along
from rltrain.tasks.roles import SYNCED, model_roles, served_roles

# The ranks of every role. The mode of two roles follows from their ranks and is never configured.

Mode = Literal["colocated", "disaggregated", "hybrid"]

NODE_PREFIX, REST = "node:", "rest"
RANGE = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
GRAMMAR = (
    'inclusive ranks such as 3, "0,2,3", "0-3", "0-3,5,7", nodes such as "node:1-2" or "node:0,2", "all", or "rest" by '
    'itself, or RLinf\'s form with processes after a colon: "0-3:0-3"'
)


@dataclass(frozen=True)
class Placement:
    """The ranks of every role, sorted. Roles are in the order of `rltrain.config.section.role_names`."""

    ranks_by_role: Mapping[str, tuple[int, ...]]
    given: Mapping[str, str]
    """Role -> the config key and string of its ranks, for messages."""
    world_size: int

    @classmethod
    def of(cls, config: Config, world_size: int, ranks_per_node: int = 8) -> "Placement":
        """Returns the placement of `config` in a world of this size. Raises PlacementError if it does not fit."""
        return placement_of(config, world_size, min(ranks_per_node, world_size))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.ranks_by_role)

    def ranks(self, role: str) -> tuple[int, ...]:
        """Returns the world ranks of `role`. Raises PlacementError if the role is not placed."""
        if role not in self.ranks_by_role:
            raise PlacementError(f"placement.{role}: the role is not placed; placed are {', '.join(self.roles)}")
        return self.ranks_by_role[role]

    def hosts(self, rank: int) -> tuple[str, ...]:
        """Returns the roles of `rank`."""
        return self._hosts.get(rank, ())

    @cached_property
    def _hosts(self) -> dict[int, tuple[str, ...]]:
        hosted: dict[int, list[str]] = {}
        for role, ranks in self.ranks_by_role.items():
            for rank in ranks:
                hosted.setdefault(rank, []).append(role)
        return {rank: tuple(roles) for rank, roles in hosted.items()}

    @property
    def hosting(self) -> tuple[int, ...]:
        """The ranks that have a role."""
        return tuple(sorted(set().union(*self.ranks_by_role.values())))

    def hosting_nothing_but(self, roles: Collection[str]) -> tuple[int, ...]:
        """Returns the ranks all of whose roles are in `roles`. Idle ranks are not among them."""
        return tuple(rank for rank in self.hosting if set(self.hosts(rank)) <= set(roles))

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks without any role."""
        return tuple(sorted(set(range(self.world_size)).difference(self.hosting)))

    def mode(self, role_a: str, role_b: str) -> Mode:
        """Returns "colocated" for equal ranks, "disaggregated" for disjoint ones, else "hybrid"."""
        a, b = set(self.ranks(role_a)), set(self.ranks(role_b))
        if a == b:
            return "colocated"
        return "disaggregated" if a.isdisjoint(b) else "hybrid"


def placement_of(config: Config, world_size: int, ranks_per_node: int) -> Placement:
    """Returns the placement of `config`. Raises PlacementError like `resolve_placement`.

    Role inference is dropped if it has the ranks and the parallel layout of the actor. The actor then does its work.
    """
    placement = resolve_placement(config.placement, world_size, ranks_per_node)
    ranks = placement.ranks_by_role
    shares_ranks = "inference" in ranks and ranks["inference"] == ranks.get("actor")
    if shares_ranks and config.parallel_of("inference")[0] == config.actor.parallel:
        return replace(placement, ranks_by_role={role: ranks[role] for role in ranks if role != "inference"})
    return placement


def resolve_placement(mapping: Mapping[str, str | int], world_size: int, ranks_per_node: int) -> Placement:
    """Returns the placement of a config section `placement` in a world of `world_size` ranks.

    It sets nothing up. Raises PlacementError with the config key, the given string and the expected form.
    """
    placed: dict[str, tuple[int, ...]] = {}
    given: dict[str, str] = {}
    for key, ranks in _ranks_of_keys(mapping, world_size, ranks_per_node).items():
        where = _where(mapping, key)
        for role in split_roles(key):
            if not role:
                raise PlacementError(f"{where}: the key has an empty role name; expected comma-joined role names")
            if role in placed:
                raise PlacementError(f"{where}: role {role} is already placed by {given[role]}; name each role once")
            placed[role], given[role] = ranks, where
    if not placed:
        raise PlacementError("placement: no role is placed; expected role: ranks, for example actor: 0-3")
    names = role_names()
    roles = sorted(placed, key=lambda role: (names.index(role) if role in names else len(names), role))
    return Placement({role: placed[role] for role in roles}, given, world_size)


def _where(mapping: Mapping[str, str | int], key: str) -> str:
    """Returns the beginning of messages about a key."""
    return f"placement.{key}: {str(mapping[key])!r}"


def _ranks_of_keys(
    mapping: Mapping[str, str | int], world_size: int, ranks_per_node: int
) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of every key, in the order of `mapping`. Raises PlacementError for keys without valid ranks."""
    to_rest = [key for key, value in mapping.items() if str(value).strip() == REST]
    ranks = {
        key: parse_ranks(str(value), world_size, ranks_per_node, _where(mapping, key))
        for key, value in mapping.items()
        if key not in to_rest
    }
    if len(to_rest) > 1:
        raise PlacementError(
            f"{_where(mapping, to_rest[1])}: placement.{to_rest[0]} is rest too; expected one key for all roles on "
            f'the remaining ranks: "{", ".join(to_rest)}": {REST}'
        )
    for key in to_rest:
        ranks[key] = tuple(sorted(set(range(world_size)).difference(*ranks.values())))
        if not ranks[key]:
            raise PlacementError(
                f"{_where(mapping, key)}: no rank is left: other roles are on {format_ranks(range(world_size))}, all "
                "ranks of the job; expected more ranks (torchrun's --nnodes, --nproc-per-node), or smaller other roles"
            )
    return {key: ranks[key] for key in mapping}


def parse_ranks(text: str, world_size: int, ranks_per_node: int, where: str = "placement") -> tuple[int, ...]:
    """Returns the world ranks named by `text`, sorted. Raises PlacementError if it names no ranks. `where` begins its
    message.

    RLinf's form `a-b:c-d` also names the processes of the role on these ranks. In rltrain a process has one rank or
    several, such as the ranks of an engine. So there can be no more processes than ranks.
    """
    ranges = text.strip()
    if ranges == "all":
        return tuple(range(world_size))
    if not ranges.startswith(NODE_PREFIX):
        return _parse_ranges(_without_processes(ranges, world_size, where), "rank", world_size, where)
    num_nodes = -(-world_size // ranks_per_node)
    nodes = _parse_ranges(ranges.removeprefix(NODE_PREFIX), "node", num_nodes, where)
    first_ranks = (node * ranks_per_node for node in nodes)
    return tuple(r for first in first_ranks for r in range(first, min(first + ranks_per_node, world_size)))


def format_ranks(ranks: Iterable[int]) -> str:
    """Returns the shortest text of ranges for `ranks`: (0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def role_grids(config: Config, placement: Placement) -> dict[str, Grid]:
    """Returns the grid of every placed role.

    Raises PlacementError if tp * pp * cp does not divide a role's ranks, or ep * etp those of a pipeline stage.
    """
    grids = {}
    for role in placement.roles:
        parallel, key = config.parallel_of(role)
        ranks = placement.ranks(role)
        replica_size = parallel.tp * parallel.pp * parallel.cp
        if len(ranks) % replica_size:
            sizes = f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = {replica_size}"
            raise PlacementError(
                f"{placement.given[role]}: role {role} has {len(ranks)} ranks, but one copy of its model takes "
                f"{sizes}; expected a multiple of {replica_size} ranks, or another {key}"
            )
        # An engine's experts are on the ranks of its tensor parallelism.
        of_engine = max(1, parallel.tp // parallel.ep) if parallel.ep > 1 and role in served_roles() else None
        grid = Grid(
            ranks,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            etp=of_engine or parallel.etp,
            vpp=parallel.vpp,
            layers_per_stage=parallel.layers_per_stage,
            copies=_copies(config, role, len(ranks), placement.given[role]),
        )
        _refuse_expert_shares(grid, key, f"{placement.given[role]}: role {role}")
        grids[role] = grid
    return grids


def _copies(config: Config, role: str, num_ranks: int, given: str) -> int | None:
    """Returns `Grid.copies` of a role. Raises PlacementError if it does not divide the role's ranks."""
    if role not in model_roles() or config.backend_of(role) != "fsdp":
        return None
    copies = config.fsdp_of(role).replicas
    if num_ranks % copies:
        raise PlacementError(
            f"{given}: role {role} has {num_ranks} ranks, but {role}.fsdp.replicas (or the actor's) asks for {copies} "
            f"copies of its model; expected a multiple of {copies} ranks, or a divisor of {num_ranks} as replicas"
        )
    return copies


def _refuse_expert_shares(grid: Grid, key: str, who: str) -> None:
    """Raises PlacementError if ep * etp does not divide the ranks of a pipeline stage."""
    stage, etp = len(grid.ranks) // grid.pp, grid.etp or grid.tp
    if stage % (grid.ep * etp) == 0:
        return
    legal = [n for n in range(1, stage + 1) if stage % (n * etp) == 0]
    nearest = f"ep {min(legal, key=lambda n: (abs(n - grid.ep), n))}" if legal else "etp 1"
    given = f"etp {etp}" if grid.etp else f"etp {etp} (null, so equal to tp)"
    raise PlacementError(
        f"{who} has {stage} ranks in a pipeline stage, but {key} divides experts among ep {grid.ep} x {given} = "
        f"{grid.ep * etp}; expected a divisor of {stage}. The nearest that works is {nearest}"
    )


def _without_processes(text: str, world_size: int, where: str) -> str:
    """Returns `text` without the processes after each colon. They are counted from 0 in the order of the ranks."""
    items, first = [], 0
    for item in text.split(","):
        ranks, colon, processes = (part.strip() for part in item.partition(":"))
        if not colon or (ranks != "all" and RANGE.fullmatch(ranks) is None):
            items.append(item)
            continue
        items.append(f"0-{world_size - 1}" if ranks == "all" else ranks)
        named = RANGE.fullmatch(processes)
        if named is None:
            raise PlacementError(f"{where}: {processes!r} after the colon is no range of processes; expected {GRAMMAR}")
        number = len(_parse_ranges(items[-1], "rank", world_size, where))
        count = int(named[2] or named[1]) - int(named[1]) + 1
        if int(named[1]) != first:
            raise PlacementError(
                f"{where}: the processes of {item.strip()!r} begin with {named[1]}; expected {first}, since the "
                "processes of a role are numbered in the order of its ranks"
            )
        if count > number:
            raise PlacementError(
                f"{where}: {item.strip()!r} puts {count} processes on {number} ranks; expected at most one process per "
                "rank"
            )
        if number % max(count, 1):
            raise PlacementError(
                f"{where}: {item.strip()!r} divides {number} ranks among {count} processes; expected a divisor of "
                f"{number}. One process corresponds to the parallel.tp ranks of an engine or model copy"
            )
        first += count
    return ",".join(items)


def _parse_ranges(text: str, unit: str, count: int, where: str) -> tuple[int, ...]:
    numbers: set[int] = set()
    for item in (item.strip() for item in text.split(",")):
        match = RANGE.fullmatch(item)
        if match is None:
            what = f"{item!r} is no {unit} or range of {unit}s" if item else f"a {unit} or range of {unit}s is missing"
            raise PlacementError(f"{where}: {what}; expected {GRAMMAR}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise PlacementError(f"{where}: range {item!r} is reversed; expected {last}-{first}")
        if last >= count:
            raise PlacementError(
                f"{where}: {unit} {last} does not exist; expected {unit}s in 0-{count - 1} ({count} in this world)"
            )
        twice = numbers.intersection(range(first, last + 1))
        if twice:
            raise PlacementError(f"{where}: {unit} {min(twice)} is named twice; name each {unit} of a role once")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


# The rank lists for which a job needs process groups. Equal on every rank.

RankList = tuple[int, ...]

SYNCED_PAIRS = tuple(("actor", role) for role in SYNCED.values())


def model_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """Returns the rank lists of a Megatron model on `grid`, by the field names of Megatron's ProcessGroupCollection.

    Every list is ascending. An embedding list has the pipeline stages with a copy of the embeddings.
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
    """Returns every rank list needed by the roles of `grids`, once each, in the order in which all ranks create groups.

    Each role needs its ranks and its replicas. A role with a Megatron model also needs the lists of the model. A pair
    of roles with a weight sync between them needs the union of their ranks.
    """
    lists = {ranks for of_roles in role_group_lists(grids).values() for ranks in of_roles}
    return tuple(sorted(lists, key=global_order))


def role_group_lists(grids: Mapping[str, Grid]) -> dict[frozenset[str], set[RankList]]:
    """Returns role sets, each with the rank lists of tasks in which at least these roles take part."""
    lists: dict[frozenset[str], set[RankList]] = {}
    for role, grid in grids.items():
        own = lists[frozenset({role})] = {grid.ranks, *grid.lists("pp", "cp", "tp")}
        if role in model_roles():
            own.update(ranks for field in model_group_lists(grid).values() for ranks in field)
    for pair in SYNCED_PAIRS:
        if all(role in grids for role in pair):
            lists[frozenset(pair)] = {tuple(sorted({rank for role in pair for rank in grids[role].ranks}))}
    return lists


def lists_of_task(roles: Iterable[str], grids: Mapping[str, Grid]) -> set[RankList]:
    """Returns the rank lists that a task of `roles` may use. All of their members take part in the task."""
    taking_part = frozenset(roles)
    return {ranks for users, lists in role_group_lists(grids).items() if users <= taking_part for ranks in lists}


def global_order(ranks: RankList) -> tuple[int, RankList]:
    """Returns the sort key of a list for the order in which all ranks create groups."""
    return len(ranks), ranks


def _expert_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """Returns the lists of expert layers. Raises ValueError if expert parallelism does not divide the grid's ranks."""
    ranks = grid.expert_array
    pp, expert_dp, ep, tp = range(4)
    return {
        "ep": lists_along(ranks, ep),
        "expt_tp": lists_along(ranks, tp),
        "expt_dp": lists_along(ranks, expert_dp),
        "tp_ep": lists_along(ranks, ep, tp),
        "tp_ep_pp": lists_along(ranks, pp, ep, tp),
    }


def _shard_group_lists(grid: Grid) -> dict[str, tuple[RankList, ...]]:
    """Returns the lists of a model sharded over all ranks: the ranks of each copy, and the ranks with equal shards."""
    if not grid.is_sharded:
        return {}
    return {"shard": lists_along(grid.sharded_array, 1), "replicate": lists_along(grid.sharded_array, 0)}
