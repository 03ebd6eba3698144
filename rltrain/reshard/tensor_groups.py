"""A reshard piecemeal by canonical tensors, for sources that are made when they are asked for."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rltrain.models.table import ITEM_BYTES, Array, CanonicalTensors, IntArray, TypeArray
from rltrain.reshard.layout import Layout, RankLayout

BoolArray = NDArray[np.bool_]

MADE_BYTES = 2**28
"""Of whole layers, of which a rank makes its share at a time."""


def tensor_groups(tensors: CanonicalTensors, types: TypeArray, max_bytes: int) -> Iterator[BoolArray]:
    """[tensors] which belong to each group: whole layers in their order, as many as `max_bytes` hold, or one; what
    belongs to no layer goes with the one before it. Pure: equal on all ranks."""
    sizes = (tensors.matrix_shapes.prod(axis=1) * ITEM_BYTES[types]).tolist()
    layer = [_layer_of(name) for name in tensors.names]
    group, held, groups = 0, 0, []
    last: str | None = None
    of_layer: dict[str, int] = {}
    for number, size in zip(layer, sizes, strict=True):
        if number is not None:
            of_layer[number] = of_layer.get(number, 0) + size
    for number in layer:
        if number is not None and number != last:
            if held and held + of_layer[number] > max_bytes:
                group, held = group + 1, 0
            held, last = held + of_layer[number], number
        groups.append(group)
    numbered = np.array(groups)
    for index in range(group + 1):
        yield numbered == index


def holding(layout: Layout, tensors: BoolArray) -> Layout:
    """What `layout` has of some tensors: parameters with nothing of them are not in it. Tensors keep their numbers."""
    return replace(layout, build=partial(_holding, layout, tensors))


def holding_rows(layout: Layout, rows: IntArray) -> Layout:
    """What `layout` has of `rows` [tensors, 2], from and to: parameters with nothing of them are not in it; those that
    are keep their shapes."""
    return replace(layout, build=partial(_holding_rows, layout, rows))


def _holding_rows(layout: Layout, rows: IntArray, share: int) -> RankLayout:
    whole = layout.part(share)
    first, end = rows[whole.pieces["tensor"]].T
    before = whole.pieces["row"]
    first, end = np.maximum(before, first), np.minimum(before + whole.pieces["rows"], end)
    some = first < end
    pieces = whole.pieces[some]
    pieces["offset"] += (first - before)[some] * pieces["stride"]
    pieces["row"], pieces["rows"] = first[some], (end - first)[some]
    return _of_pieces(whole, pieces)


def _holding(layout: Layout, tensors: BoolArray, share: int) -> RankLayout:
    whole = layout.part(share)
    return _of_pieces(whole, whole.pieces[tensors[whole.pieces["tensor"]]])


def _of_pieces(whole: RankLayout, pieces: Array) -> RankLayout:
    held, pieces["parameter"] = np.unique(pieces["parameter"], return_inverse=True)
    return RankLayout(lambda: tuple(whole.parameters[number] for number in held), pieces)


def _layer_of(name: str) -> str | None:
    """The part of a tensor's name that tells its layer."""
    before, layers, after = name.partition(".layers.")
    return after.partition(".")[0] if layers else None
