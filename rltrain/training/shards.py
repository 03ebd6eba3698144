"""Which boxes of a checkpoint's tensors lie in a range of a parameter, and which of its pieces a rank answers for."""

import numpy as np

from rltrain.models.canonical_tensors import Array, IntArray
from rltrain.reshard.layout import Layout
from rltrain.reshard.plan.match import elements, fragments_of


def within(pieces: Array, starts: IntArray, stops: IntArray) -> Array:
    """What `pieces` have in elements `starts[i]` to `stops[i]` of every flattened parameter i, at most 3 boxes a piece.

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
    """How many of each piece's elements, row by row, lie before a position of its parameter."""
    row, col = np.divmod(position - pieces["offset"], pieces["stride"])
    before: IntArray = row * pieces["cols"] + np.minimum(col, pieces["cols"])
    return np.clip(before, 0, elements(pieces))


def answered_for(layout: Layout, rank: int) -> Array:
    """The pieces of `rank` that ranks with a smaller part do not hold as well: of all distinct parts one has each box.

    Ranks with equal parts answer for the same pieces.
    """
    mine = layout.parts[layout.ranks.index(rank)]
    fragments = fragments_of(layout).of_part
    held = fragments[mine]
    before = [numbers for part, numbers in fragments.items() if part < mine]
    is_first = np.zeros(len(held), dtype=bool)
    is_first[np.unique(held, return_index=True)[1]] = True
    if before:
        is_first &= ~np.isin(held, np.concatenate(before))
    answered: Array = layout.on(rank).pieces[is_first]
    return answered


def replica_of(layout: Layout, rank: int) -> tuple[int, int]:
    """(index, size) of `rank` among the ranks with its part."""
    mine = layout.parts[layout.ranks.index(rank)]
    replicas = [other for other, part in zip(layout.ranks, layout.parts, strict=True) if part == mine]
    return replicas.index(rank), len(replicas)
