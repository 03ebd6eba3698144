"""Which boxes of a destination layout overlap which boxes of a source layout. Arrays only, nothing is communicated."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.models.table import ITEM_BYTES, Array, CanonicalTensors, IntArray, TypeArray
from rltrain.reshard.layout import BOX_FIELDS, Layout

BOX = np.dtype([(name, np.int64) for name in BOX_FIELDS])


@dataclass(frozen=True, eq=False)
class Fragments:
    """The distinct boxes of a source layout, sorted by tensor and place; no two overlap.

    `holder_sets[holders[i]]` are the ranks that hold fragment i, ascending. `of_part[part]` [pieces] are the fragments
    that the pieces of a part are.
    """

    boxes: Array
    holders: IntArray
    holder_sets: tuple[IntArray, ...]
    of_part: dict[int, IntArray]

    @cached_property
    def starts(self) -> IntArray:
        """[fragments]: where each begins when the elements of all are numbered through."""
        sizes = elements(self.boxes)
        starts: IntArray = np.cumsum(sizes) - sizes
        return starts


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Boxes shared by piece `piece` and fragment `fragment`, in the order of the pieces."""

    boxes: Array
    piece: IntArray
    fragment: IntArray


def fragments_of(layout: Layout) -> Fragments:
    """Raises ValueError where two shares of the source overlap without being equal."""
    parts = sorted(set(layout.parts))
    per_part = [boxes_of(layout.part(part).pieces) for part in parts]
    boxes, inverse = distinct(np.concatenate(per_part))
    _refuse_overlaps(boxes, layout.tensors)
    ends = np.cumsum([len(pieces) for pieces in per_part])
    of_part = dict(zip(parts, np.split(inverse, ends[:-1]), strict=True))
    holders, part_sets = _sets_of(len(boxes), of_part)
    ranks = {part: [r for r, p in zip(layout.ranks, layout.parts, strict=True) if p == part] for part in parts}
    holder_sets = tuple(np.array(sorted(r for part in held for r in ranks[part]), dtype=np.int64) for held in part_sets)
    return Fragments(boxes, holders, holder_sets, of_part)


def match(pieces: Array, fragments: Fragments, tensors: CanonicalTensors) -> Overlaps:
    """Where the elements of `pieces` are found. Raises ValueError naming a tensor that the source lacks a part of."""
    found = overlaps(pieces, fragments.boxes)
    covered = np.bincount(found.piece, weights=elements(found.boxes), minlength=len(pieces)).astype(np.int64)
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
    for start, extent in (("row", "rows"), ("col", "cols")):
        one, other = pieces[start][piece], boxes[start][fragment]
        kept = (one < other + boxes[extent][fragment]) & (other < one + pieces[extent][piece])
        piece, fragment = piece[kept], fragment[kept]
    shared = np.empty(len(piece), dtype=BOX)
    shared["tensor"] = pieces["tensor"][piece]
    for start, extent in (("row", "rows"), ("col", "cols")):
        one, other = pieces[start][piece], boxes[start][fragment]
        stop = np.minimum(one + pieces[extent][piece], other + boxes[extent][fragment])
        shared[start] = np.maximum(one, other)
        shared[extent] = stop - shared[start]
    return Overlaps(shared, piece, fragment)


def distinct(boxes: Array) -> tuple[Array, IntArray]:
    """(the distinct boxes in the order of their fields, the number among them of each given box)."""
    order = np.lexsort([boxes[name] for name in reversed(BOX_FIELDS)])
    ordered = boxes[order]
    new = np.ones(len(boxes), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(len(boxes), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return ordered[new], inverse


def set_numbers(member: IntArray, group: IntArray, num_groups: int) -> tuple[IntArray, list[tuple[int, ...]]]:
    """Group i has the members `member[group == i]`: (the number of each group's set of members, the sets, sorted)."""
    order = np.lexsort((member, group))
    member, group = member[order], group[order]
    keys = np.zeros(num_groups, dtype=np.uint64)
    np.add.at(keys, group, _mixed(member))
    _, representative, numbers = np.unique(keys, return_index=True, return_inverse=True)
    first = np.searchsorted(group, representative)
    last = np.searchsorted(group, representative, side="right")
    sets = [tuple(dict.fromkeys(member[a:b].tolist())) for a, b in zip(first, last, strict=True)]
    return numbers.astype(np.int64).reshape(-1), sets


def boxes_of(pieces: Array) -> Array:
    boxes = np.empty(len(pieces), dtype=BOX)
    for name in BOX_FIELDS:
        boxes[name] = pieces[name]
    return boxes


def elements(boxes: Array) -> IntArray:
    counts: IntArray = boxes["rows"] * boxes["cols"]
    return counts


def num_bytes(boxes: Array, types: TypeArray) -> IntArray:
    """Of each box, where tensor i is of type `types[i]`."""
    sizes: IntArray = elements(boxes) * ITEM_BYTES[types[boxes["tensor"]]]
    return sizes


def offsets(pieces: Array, boxes: Array) -> IntArray:
    """Where `boxes` begin in the parameters of the `pieces` that contain them."""
    rows: IntArray = boxes["row"] - pieces["row"]
    cols: IntArray = boxes["col"] - pieces["col"]
    begin: IntArray = rows * pieces["stride"] + cols + pieces["offset"]
    return begin


def describe(box: np.void, tensors: CanonicalTensors) -> str:
    row, col = int(box["row"]), int(box["col"])
    return f"{tensors.names[box['tensor']]}[{row}:{row + int(box['rows'])}, {col}:{col + int(box['cols'])}]"


def _sets_of(num_boxes: int, of_part: dict[int, IntArray]) -> tuple[IntArray, list[tuple[int, ...]]]:
    """(the number of each box's set of parts, the sets)."""
    part = np.repeat(np.array(list(of_part), dtype=np.int64), [len(boxes) for boxes in of_part.values()])
    span = int(part.max()) + 1
    held = np.unique(np.concatenate(list(of_part.values())) * span + part)
    return set_numbers(held % span, held // span, num_boxes)


def _mixed(numbers: IntArray) -> np.ndarray:
    """Well spread 64-bit keys, so that sums of distinct sets of them differ (the finaliser of splitmix64)."""
    keys = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _refuse_overlaps(boxes: Array, tensors: CanonicalTensors) -> None:
    among = overlaps(boxes, boxes)
    clash = np.flatnonzero(among.piece != among.fragment)
    if len(clash):
        first, second = (describe(boxes[side[clash[0]]], tensors) for side in (among.piece, among.fragment))
        raise ValueError(f"source ranks hold overlapping but different boxes of a tensor: {first} and {second}")
