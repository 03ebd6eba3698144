"""Boxes of checkpoint tensors within a range of a parameter, and the pieces saved by a rank."""

from collections.abc import Mapping, Sequence

import numpy as np

from rltrain.models.table import Array, IntArray
from rltrain.reshard.layout import Layout, elements, fragments_of
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import RankList, model_group_lists

Range = tuple[int, int]
"""(start, stop) in a flattened parameter."""


def limits(names: Sequence[str], ranges: Mapping[str, Range]) -> tuple[IntArray, IntArray]:
    """Returns (starts, stops) per parameter. A parameter without a range gets an empty one."""
    found = np.array([ranges.get(name, (0, 0)) for name in names], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def within(pieces: Array, starts: IntArray, stops: IntArray) -> Array:
    """Cuts `pieces` to elements `starts[i]` to `stops[i]` of every flattened parameter i, into at most 3 boxes per
    piece.

    Offsets count from `starts[i]`.
    """
    start, stop = starts[pieces["parameter"]], stops[pieces["parameter"]]
    cols = pieces["cols"]
    first_row, first_col = np.divmod(_elements_before(pieces, start), cols)
    last_row, last_col = np.divmod(_elements_before(pieces, stop), cols)
    one_row = first_row == last_row
    partial = (first_col > 0) | one_row
    boxes = [  # row and column within the piece, rows, columns
        (first_row, first_col, partial, np.where(one_row, last_col, cols) - first_col),
        (first_row + partial, 0, last_row - first_row - partial, cols),
        (last_row, 0, ~one_row, last_col),
    ]
    cut = np.repeat(pieces[:, None], len(boxes), axis=1)
    for index, (row, col, num_rows, num_cols) in enumerate(boxes):
        box = cut[:, index]
        box["row"] += row
        box["col"] += col
        box["rows"], box["cols"] = np.maximum(num_rows, 0), num_cols
        box["offset"] += row * pieces["stride"] + col - start
    kept: Array = cut[elements(cut) > 0]
    return kept


def _elements_before(pieces: Array, position: IntArray) -> IntArray:
    """Returns the number of each piece's elements, row by row, before a position of its parameter."""
    row, col = np.divmod(position - pieces["offset"], pieces["stride"])
    before: IntArray = row * pieces["cols"] + np.minimum(col, pieces["cols"])
    return np.clip(before, 0, elements(pieces))


def answered_for(layout: Layout, rank: int, groups: Sequence[RankList] = ()) -> Array:
    """Returns the pieces of `rank` to save: those not held by an earlier group of ranks. So one group has each box.

    Ranks of one of the `groups` hold the same boxes and get the same pieces. By default the ranks of each part of the
    layout form a group.
    """
    fragments = fragments_of(layout).of_part
    part_of = dict(zip(layout.ranks, layout.parts, strict=True))
    if groups:
        number = next(number for number, ranks in enumerate(groups) if rank in ranks)
        before = [fragments[part_of[ranks[0]]] for ranks in groups[:number]]
    else:
        before = [numbers for part, numbers in fragments.items() if part < part_of[rank]]
    held = fragments[part_of[rank]]
    is_first = np.zeros(len(held), dtype=bool)
    is_first[np.unique(held, return_index=True)[1]] = True
    if before:
        is_first &= ~np.isin(held, np.concatenate(before))
    answered: Array = layout.on(rank).pieces[is_first]
    return answered


def sharing_groups(grid: Grid) -> tuple[Sequence[RankList], Sequence[RankList]]:
    """Returns the groups of ranks with shared optimizer states: (for other parameters, for experts)."""
    lists = model_group_lists(grid)
    return lists["dp_cp"], lists["expt_dp"]


def replica_of(layout: Layout, rank: int) -> tuple[int, int]:
    """Returns (index, size) of `rank` in its group of ranks with equal parts of the layout, in the layout's order.

    A rank of index 0 can act for its group, for example as the only writer of the part.
    """
    mine = layout.parts[layout.ranks.index(rank)]
    replicas = [other for other, part in zip(layout.ranks, layout.parts, strict=True) if part == mine]
    return replicas.index(rank), len(replicas)
