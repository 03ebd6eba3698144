"""Whole tensors of a checkpoint as a layout, shared out over ranks."""

from dataclasses import replace
from functools import partial

import numpy as np

from rltrain.models import Architecture, canonical_tensors, element_types
from rltrain.models.table import CanonicalTensors, IntArray
from rltrain.reshard.layout import PIECE, Layout, RankLayout


def hf_layout(architecture: Architecture, ranks: tuple[int, ...], *, dtype: str = "float32") -> Layout:
    """Whole tensors of `dtype`, each a parameter, dealt out over `ranks` in consecutive runs of about equal bytes."""
    tensors = canonical_tensors(architecture)
    size = tensors.matrix_shapes.prod(axis=1)
    middle = np.cumsum(size) - size / 2
    writer = (middle * len(ranks) // size.sum()).astype(np.int64)
    return Layout(
        ranks,
        parts=tuple(range(len(ranks))),
        tensors=tensors,
        types=element_types(architecture, dtype),
        build=partial(_whole_tensors, tensors, writer),
    )


def _whole_tensors(tensors: CanonicalTensors, writer: np.ndarray, part: int) -> RankLayout:
    mine = np.flatnonzero(writer == part)
    pieces = np.zeros(len(mine), dtype=PIECE)
    pieces["tensor"], pieces["parameter"] = mine, np.arange(len(mine))
    pieces["rows"], pieces["cols"] = tensors.matrix_shapes[mine].T
    pieces["stride"] = pieces["cols"]
    return RankLayout(tuple((tensors.names[i], tensors.shapes[i]) for i in mine), pieces)


def hf_rows(layout: Layout, rows: IntArray) -> Layout:
    """What `layout`, a result of hf_layout, has of `rows` [tensors, 2], from and to: a parameter [rows, columns] of
    each tensor that has some."""
    return replace(layout, build=partial(_rows_of_tensors, layout, rows))


def _rows_of_tensors(layout: Layout, rows: IntArray, part: int) -> RankLayout:
    whole = layout.part(part)
    first, end = rows[whole.pieces["tensor"]].T
    pieces = whole.pieces[end > first]
    pieces["row"], pieces["rows"] = first[end > first], (end - first)[end > first]
    names = [whole.parameters[number][0] for number in pieces["parameter"]]
    pieces["parameter"] = np.arange(len(pieces))
    shapes = zip(pieces["rows"].tolist(), pieces["cols"].tolist(), strict=True)
    return RankLayout(tuple(zip(names, shapes, strict=True)), pieces)
