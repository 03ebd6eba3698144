"""A layout as several of some parameters each, so that a reshard can be carried out piecemeal through little memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rltrain.models.table import ITEM_BYTES, TypeArray
from rltrain.reshard.layout import Layout, RankLayout

Run = tuple[int, int]
"""[first, stop) of a share's parameters."""


def split(layout: Layout, max_bytes: int) -> list[Layout]:
    """Parameters in their order, as many per layout as `max_bytes` hold; one that is larger alone.

    Together the results have the parameters and pieces of `layout`, each once; canonical tensors keep their numbers, so
    that each is a destination for the same source. A pure function: equal on all ranks. Where shares have different
    parameters, some may have none in the last results.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected at least one byte")
    runs = {share: _runs(layout, share, max_bytes) for share in sorted(set(layout.parts))}
    num_parts = max(len(of_share) for of_share in runs.values())
    return [
        replace(layout, build=partial(_chosen, layout, {share: _run(of_share, i) for share, of_share in runs.items()}))
        for i in range(num_parts)
    ]


def parameter_types(layout: Layout, share: int) -> TypeArray:
    """[parameters]: the element type of each of a share's parameters.

    One that holds padding alone, as the last rows of a vocabulary may, has the type of its namesakes in other shares;
    without any, the layout's most frequent one.
    """
    on = layout.part(share)
    types = np.full(len(on.parameters), np.bincount(layout.types).argmax(), dtype=np.uint8)
    bare = np.ones(len(types), dtype=bool)
    types[on.pieces["parameter"]], bare[on.pieces["parameter"]] = layout.types[on.pieces["tensor"]], False
    if bare.any():
        named = _types_by_name(layout)
        for number in np.flatnonzero(bare).tolist():
            types[number] = named.get(on.parameters[number][0], types[number])
    return types


def _types_by_name(layout: Layout) -> Mapping[str, int]:
    named: dict[str, int] = {}
    for share in sorted(set(layout.parts)):
        on = layout.part(share)
        numbers, first = np.unique(on.pieces["parameter"], return_index=True)
        kinds = layout.types[on.pieces["tensor"][first]]
        named |= {on.parameters[n][0]: kind for n, kind in zip(numbers.tolist(), kinds.tolist(), strict=True)}
    return named


def _runs(layout: Layout, share: int, max_bytes: int) -> list[Run]:
    elements = [int(np.prod(shape)) for _, shape in layout.part(share).parameters]
    sizes = (np.array(elements, dtype=np.int64) * ITEM_BYTES[parameter_types(layout, share)]).tolist()
    runs: list[Run] = []
    first = held = 0
    for number, size in enumerate(sizes):
        if number > first and held + size > max_bytes:
            runs.append((first, number))
            first, held = number, 0
        held += size
    return [*runs, (first, len(sizes))]


def _run(runs: Sequence[Run], index: int) -> Run:
    return runs[index] if index < len(runs) else (0, 0)


def _chosen(layout: Layout, runs: Mapping[int, Run], share: int) -> RankLayout:
    first, stop = runs[share]
    whole = layout.part(share)
    number = whole.pieces["parameter"]
    pieces = whole.pieces[(number >= first) & (number < stop)]
    pieces["parameter"] -= first
    return RankLayout(lambda: whole.parameters[first:stop], pieces)
