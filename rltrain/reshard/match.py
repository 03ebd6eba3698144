"""Which boxes of a destination layout overlap which boxes of a source layout. Arrays only, nothing is communicated."""

from dataclasses import dataclass

import numpy as np

from rltrain.reshard.layout import BOX_FIELDS, Array, CanonicalTensors, IntArray, Layout

BOX = np.dtype([(name, np.int64) for name in BOX_FIELDS])


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces of a layout, part by part: `part_numbers[i]` has `pieces[starts[i]:starts[i + 1]]`."""

    pieces: Array
    part_numbers: IntArray
    starts: IntArray

    @staticmethod
    def of(layout: Layout) -> "Pieces":
        part_numbers = np.unique(np.array(layout.parts, dtype=np.int64))
        per_part = [layout.part(int(part)).pieces for part in part_numbers]
        starts = np.cumsum([0, *map(len, per_part)])
        return Pieces(np.concatenate(per_part), part_numbers, starts)


@dataclass(frozen=True, eq=False)
class Fragments:
    """The distinct boxes of a source layout, sorted by tensor; no two overlap.

    `held[fragment, i]` is the number of the piece in which the i-th part holds a fragment, or -1.
    """

    boxes: Array
    source: Pieces
    held: IntArray


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Boxes shared by piece `piece` and fragment `fragment`, in the order of the pieces."""

    boxes: Array
    piece: IntArray
    fragment: IntArray


def fragments_of(layout: Layout) -> Fragments:
    """Raises ValueError where two shares of the source overlap without being equal."""
    source = Pieces.of(layout)
    boxes, inverse = np.unique(boxes_of(source.pieces), return_inverse=True)
    part = np.repeat(np.arange(len(source.part_numbers)), np.diff(source.starts))
    held = np.full((len(boxes), len(source.part_numbers)), -1, dtype=np.int64)
    held[inverse, part] = np.arange(len(source.pieces))
    among = overlaps(boxes, boxes)
    clash = np.flatnonzero(among.piece != among.fragment)
    if len(clash):
        first, second = (describe(boxes[side[clash[0]]], layout.tensors) for side in (among.piece, among.fragment))
        raise ValueError(f"source ranks hold overlapping but different boxes of a tensor: {first} and {second}")
    return Fragments(boxes, source, held)


def match(pieces: Array, fragments: Fragments, tensors: CanonicalTensors) -> Overlaps:
    """Where the elements of `pieces` are found. Raises ValueError naming a tensor that the source lacks a part of."""
    found = overlaps(pieces, fragments.boxes)
    covered = np.zeros(len(pieces), dtype=np.int64)
    np.add.at(covered, found.piece, elements(found.boxes))
    missing = np.flatnonzero(covered != elements(pieces))
    if len(missing):
        piece = pieces[missing[0]]
        raise ValueError(
            f"the source holds {covered[missing[0]]} of {piece['rows'] * piece['cols']} elements of "
            f"{describe(piece, tensors)}"
        )
    return found


def overlaps(pieces: Array, boxes: Array) -> Overlaps:
    """Every non-empty intersection of `pieces` with `boxes`, which are sorted by tensor."""
    first = np.searchsorted(boxes["tensor"], pieces["tensor"], side="left")
    count = np.searchsorted(boxes["tensor"], pieces["tensor"], side="right") - first
    piece = np.repeat(np.arange(len(pieces)), count)
    fragment = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count - first, count)
    shared = np.empty(len(piece), dtype=BOX)
    shared["tensor"] = pieces["tensor"][piece]
    for start, extent in (("row", "rows"), ("col", "cols")):
        one, other = pieces[start][piece], boxes[start][fragment]
        stop = np.minimum(one + pieces[extent][piece], other + boxes[extent][fragment])
        shared[start] = np.maximum(one, other)
        shared[extent] = stop - shared[start]
    kept = (shared["rows"] > 0) & (shared["cols"] > 0)
    return Overlaps(shared[kept], piece[kept], fragment[kept])


def boxes_of(pieces: Array) -> Array:
    boxes = np.empty(len(pieces), dtype=BOX)
    for name in BOX_FIELDS:
        boxes[name] = pieces[name]
    return boxes


def elements(boxes: Array) -> IntArray:
    counts: IntArray = boxes["rows"] * boxes["cols"]
    return counts


def offsets(pieces: Array, boxes: Array) -> IntArray:
    """Where `boxes` begin in the parameters of the `pieces` that contain them."""
    rows: IntArray = boxes["row"] - pieces["row"]
    cols: IntArray = boxes["col"] - pieces["col"]
    begin: IntArray = rows * pieces["stride"] + cols + pieces["offset"]
    return begin


def describe(box: np.void, tensors: CanonicalTensors) -> str:
    row, col = int(box["row"]), int(box["col"])
    return f"{tensors.names[box['tensor']]}[{row}:{row + int(box['rows'])}, {col}:{col + int(box['cols'])}]"
