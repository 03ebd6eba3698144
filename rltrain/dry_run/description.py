"""What a job would do, in words: computed from the config alone, without torchrun, GPU or weights."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from rltrain.cluster.grid import Grid
from rltrain.cluster.placement import Placement, format_ranks, resolve_placement, role_grids
from rltrain.cluster.rank_lists import group_lists
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.dry_run.memory import describe_memory
from rltrain.dry_run.steps import describe_mode, describe_order, describe_overlaps, steady_order
from rltrain.dry_run.table import table
from rltrain.legality.architecture import check_against_architecture
from rltrain.legality.config import check_config
from rltrain.legality.doubts import doubts
from rltrain.legality.repeating import obstacle_to_repeating
from rltrain.legality.schedule import check_schedule
from rltrain.models import Architecture
from rltrain.models.of_roles import reference_uses_actor_modules, role_architectures
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan.planner import traffic
from rltrain.rollout.layout import engine_layout
from rltrain.schedule.check import check
from rltrain.schedule.steps import build_order, num_entries, shortened

CONFIG_FILE = "config.json"


def describe_job(config_path: Path, overrides: Sequence[str], world_size: int, ranks_per_node: int) -> str:
    """The whole description; raises the UserError that the job would be refused with."""
    config = load_config(config_path, overrides)
    check_config(config)
    ranks_per_node = min(ranks_per_node, world_size)
    placement = resolve_placement(config.placement, world_size, ranks_per_node)
    grids = role_grids(config, placement)
    check_schedule(config, placement, grids)
    order = build_order(config, placement)
    check(build_order(shortened(config), placement), placement)
    architectures = {}
    if Path(config.model.path, CONFIG_FILE).exists():
        architectures = role_architectures(config, placement.roles)
        check_against_architecture(config, grids, architectures)
    steady, entries = steady_order(config, placement), num_entries(config, placement)
    guests = ["reference"] if reference_uses_actor_modules(config, grids, architectures) else []
    sections = {
        f"Ranks: {world_size}, {ranks_per_node} per node": rank_map(placement, grids, world_size, ranks_per_node),
        "Pairs of roles": pair_modes(placement),
        "Parallel grids": [describe_grid(name, grid) for name, grid in grids.items()],
        "Process groups": describe_groups(grids, world_size),
        f"Schedule: {describe_mode(config)}; {entries} entries, no deadlock": describe_order(order, config),
        "Repeats": [describe_repeating(config, grids)],
        "Overlaps": describe_overlaps(steady, config, placement),
        "Memory": describe_memory(steady, config, placement, guests),
        "Weight sync": describe_weight_sync(config, grids, architectures.get("actor"), ranks_per_node),
    }
    if found := [*doubts(config, placement)]:
        sections["Warnings"] = found
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def rank_map(placement: Placement, grids: Mapping[str, Grid], world_size: int, ranks_per_node: int) -> list[str]:
    """One line per rank: its node, and its coordinates in each role that it hosts."""
    rows = [["rank", "node", *placement.roles]]
    for rank in range(world_size):
        cells = [coordinates(grids[role], rank) for role in placement.roles]
        rows.append([str(rank), str(rank // ranks_per_node), *cells])
    return table(rows)


def coordinates(grid: Grid, rank: int) -> str:
    if rank not in grid.ranks:
        return "-"
    place = grid.coordinates(rank)
    parts = {"dp": (place.dp, grid.dp), "pp": (place.pp, grid.pp), "cp": (place.cp, grid.cp), "tp": (place.tp, grid.tp)}
    return " ".join(f"{name}{index}" for name, (index, size) in parts.items() if size > 1) or "alone"


def pair_modes(placement: Placement) -> list[str]:
    pairs = combinations(placement.roles, 2)
    return table([[first, second, placement.mode(first, second)] for first, second in pairs])


def describe_grid(name: str, grid: Grid) -> str:
    sizes = f"tp {grid.tp} x pp {grid.pp} x cp {grid.cp} x ep {grid.ep} x dp {grid.dp}"
    return f"{name}: {sizes} on ranks {format_ranks(grid.ranks)}"


def describe_groups(grids: Mapping[str, Grid], world_size: int) -> list[str]:
    lists = group_lists(grids, world_size)
    most = max(sum(rank in group for group in lists) for rank in range(world_size))
    return [f"{len(lists)} in the job, at most {most} on one rank; equal rank lists share one"]


def describe_repeating(config: Config, grids: Mapping[str, Grid]) -> str:
    """Whether another run of the same config gives the same."""
    obstacle = obstacle_to_repeating(config, grids)
    return (
        f"no: {obstacle}"
        if obstacle
        else "yes, on CPUs bit for bit: what is drawn, and by which weights, depends on no clock"
    )


def describe_weight_sync(
    config: Config, grids: Mapping[str, Grid], architecture: Architecture | None, ranks_per_node: int
) -> list[str]:
    if "rollout" not in grids:
        return ["none: no rollout is placed"]
    if architecture is None:
        return [f"bytes unknown: {Path(config.model.path, CONFIG_FILE)} does not exist yet (model.path)"]
    source = megatron_layout(architecture, grids["actor"], dtype=config.model.dtype)
    destination = engine_layout(architecture, grids["rollout"], dtype=config.model.dtype)
    moved = traffic(source, destination, ranks_per_node)
    rows = [["from", "to", "bytes", "over"]]
    for (sender, receiver), num_bytes in sorted(moved.items()):
        same_node = sender // ranks_per_node == receiver // ranks_per_node
        path = "memory" if sender == receiver else "node" if same_node else "network"
        rows.append([str(sender), str(receiver), f"{num_bytes:,}", path])
    total = sum(num_bytes for (sender, receiver), num_bytes in moved.items() if sender != receiver)
    return [*table(rows), f"{total:,} bytes on the wire per sync"]
