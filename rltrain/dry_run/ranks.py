"""Which ranks host what: those that are alike together, or each on a line."""

from collections import defaultdict
from collections.abc import Mapping

from rltrain.dry_run.sizes import numbered
from rltrain.dry_run.table import table
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement


def describe_ranks(placement: Placement, ranks_per_node: int) -> list[str]:
    """One line per set of roles."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(placement.world_size):
        alike[placement.hosts(rank)].append(rank)
    lines = []
    for roles, ranks in alike.items():
        nodes = sorted({rank // ranks_per_node for rank in ranks})
        where = f"{numbered('rank', ranks)} ({numbered('node', nodes)})"
        lines.append(f"{where}: {', '.join(roles) or 'nothing'}")
    return lines


def rank_map(placement: Placement, grids: Mapping[str, Grid], ranks_per_node: int) -> list[str]:
    """One line per rank: its node, and its coordinates in each role that it hosts."""
    rows = [["rank", "node", *placement.roles]]
    for rank in range(placement.world_size):
        cells = [coordinates(grids[role], rank) for role in placement.roles]
        rows.append([str(rank), str(rank // ranks_per_node), *cells])
    return table(rows)


def coordinates(grid: Grid, rank: int) -> str:
    if rank not in grid.ranks:
        return "-"
    place = grid.coordinates(rank)
    parts = {"dp": (place.dp, grid.dp), "pp": (place.pp, grid.pp), "cp": (place.cp, grid.cp), "tp": (place.tp, grid.tp)}
    return " ".join(f"{name}{index}" for name, (index, size) in parts.items() if size > 1) or "alone"
