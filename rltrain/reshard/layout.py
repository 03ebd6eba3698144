"""Layouts describe the boxes of canonical tensors in the parameters of every rank. This module also finds the
overlapping boxes of two layouts.

Canonical tensors are the tensors of a Hugging Face checkpoint, seen as matrices. A vector of shape [n] counts as [1,
n].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from rltrain.models import Architecture, canonical_tensors, element_types
from rltrain.models.table import ITEM_BYTES, Array, CanonicalTensors, IntArray, TypeArray

Parameters = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and local shapes of parameters, in order."""

BOX_FIELDS = ("tensor", "row", "col", "rows", "cols")

PIECE = np.dtype(
    [
        ("tensor", np.int32),
        ("row", np.int64),
        ("col", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("parameter", np.int32),
        ("offset", np.int64),
        ("stride", np.int64),
    ]
)
"""A box of canonical tensor number `tensor`, stored in local parameter number `parameter`. It begins at element
`offset` of the parameter. Its rows are `stride` elements apart, and its columns are adjacent."""


class RankLayout:
    """The parameters of one rank (name and local shape) and their pieces [PIECE].

    Elements without a piece are padding. They are zeroed when the parameters are allocated and never written again.
    Planning reads the pieces of all ranks but the parameters of only one. So `parameters` may be a function.
    """

    def __init__(self, parameters: Parameters | Callable[[], Parameters], pieces: Array) -> None:
        self._parameters = parameters
        self.pieces = pieces

    @cached_property
    def parameters(self) -> Parameters:
        return self._parameters() if callable(self._parameters) else self._parameters


@dataclass(frozen=True, eq=False)
class Layout:
    """The placement of a model's tensors on `ranks`.

    Rank `ranks[i]` holds the share `parts[i]`. Replicas have equal parts. `types` [tensors] has the element type of
    every canonical tensor in this layout. `build` is a pure function from a part to its RankLayout, so every rank can
    compute the contents of any other rank.
    """

    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    tensors: CanonicalTensors
    types: TypeArray
    build: Callable[[int], RankLayout]

    @cached_property
    def _built(self) -> dict[int, RankLayout]:
        return {}

    def part(self, part: int) -> RankLayout:
        if part not in self._built:
            self._built[part] = self.build(part)
        return self._built[part]

    def on(self, rank: int) -> RankLayout:
        """Returns the contents of `rank`. It must be one of `ranks`."""
        return self.part(self.parts[self.ranks.index(rank)])


@dataclass(frozen=True)
class Segment:
    """A run of `count` consecutive rows of one tensor, starting at row `first`. Vectors count in elements instead of
    rows. `tensor` counts from the first tensor of its group."""

    tensor: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Shard:
    """One local parameter with its name, shape and pieces. The `tensor` of a piece counts from the first tensor of its
    group."""

    name: str
    shape: tuple[int, ...]
    pieces: Array


def window(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """Returns the range [start, stop) of the sequence formed by `segments` end to end."""
    kept, position = [], 0
    for segment in segments:
        low, high = max(start, position), min(stop, position + segment.count)
        if low < high:
            kept.append(Segment(segment.tensor, segment.first + low - position, high - low))
        position += segment.count
    return kept


def stacked(name: str, segments: list[Segment], length: int, width: int | None) -> Shard:
    """Returns a parameter with `segments` one below the other, from its first row on.

    The shape is [length, width], or [length] if `width` is None. Rows after the last segment are padding.
    """
    pieces = np.zeros(len(segments), dtype=PIECE)
    first = np.array([segment.first for segment in segments], dtype=np.int64)
    count = np.array([segment.count for segment in segments], dtype=np.int64)
    start = np.cumsum(count) - count
    pieces["tensor"] = [segment.tensor for segment in segments]
    if width is None:
        pieces["col"], pieces["rows"], pieces["cols"] = first, 1, count
        pieces["offset"], pieces["stride"] = start, length
        return Shard(name, (length,), pieces)
    pieces["row"], pieces["rows"], pieces["cols"] = first, count, width
    pieces["offset"], pieces["stride"] = start * width, width
    return Shard(name, (length, width), pieces)


def column_slice(name: str, rows: int, first: int, count: int) -> Shard:
    """Returns the description of a parameter with all rows of a tensor, but only its columns [first, first + count).

    `name` is the parameter's name. `rows` is the number of rows of the whole tensor. The tensor is the first of its
    group.
    """
    pieces = np.zeros(1, dtype=PIECE)
    pieces["col"], pieces["rows"], pieces["cols"], pieces["stride"] = first, rows, count, count
    return Shard(name, (rows, count), pieces)


def below(upper: Shard, lower: Shard) -> Shard:
    """Returns one parameter with the rows of `upper` and then the rows of `lower`. Both must have the same name and the
    same number of columns."""
    pieces = np.concatenate([upper.pieces, lower.pieces])
    pieces["offset"][len(upper.pieces) :] += int(np.prod(upper.shape))
    return Shard(upper.name, (upper.shape[0] + lower.shape[0], *upper.shape[1:]), pieces)


# Layouts split by parameters. A reshard in several parts needs less memory.

Run = tuple[int, int]
"""A range [first, stop) of a share's parameters."""


def split(layout: Layout, max_bytes: int) -> list[Layout]:
    """Splits a layout into layouts of consecutive parameters, each of at most `max_bytes` per rank.

    A parameter larger than `max_bytes` is alone in its layout. Together the results have every parameter and piece of
    `layout` once. Canonical tensors keep their numbers, so each result can be a destination for the same source. The
    function is pure, so all ranks get equal results. If shares differ in their parameters, some shares may be empty in
    the last results. Raises ValueError if `max_bytes` is less than 1.
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
    """Returns the element type of every parameter of a share, shape [parameters].

    A parameter may be padding alone, such as the last rows of a vocabulary. It then has the type of the parameters with
    its name in other shares. Without any, it has the layout's most frequent type.
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


# Layouts split by canonical tensors, for sources with tensors made on demand.

BoolArray = NDArray[np.bool_]

MADE_BYTES = 2**28
"""Bytes of whole layers per group. A rank makes its share of one group at a time."""


def tensor_groups(tensors: CanonicalTensors, types: TypeArray, max_bytes: int) -> Iterator[BoolArray]:
    """Yields a mask of shape [tensors] for every group of consecutive whole layers.

    A group has as many layers as fit in `max_bytes`, or one larger layer. Tensors outside layers belong to the group of
    the preceding tensor and are not counted. The function is pure, so all ranks get equal groups.
    """
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
    """Returns `layout` restricted to some tensors, given as a mask. Parameters without them are left out. Tensors keep
    their numbers."""
    none = np.zeros(len(tensors), dtype=np.int64)
    return holding_rows(layout, np.stack([none, np.where(tensors, layout.tensors.matrix_shapes[:, 0], 0)], axis=1))


def holding_rows(layout: Layout, rows: IntArray) -> Layout:
    """Returns `layout` restricted to `rows` [tensors, 2], the first and the end row of every tensor. Parameters without
    such rows are left out. The others keep their shapes."""
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
    held, pieces["parameter"] = np.unique(pieces["parameter"], return_inverse=True)
    return RankLayout(lambda: tuple(whole.parameters[number] for number in held), pieces)


def _layer_of(name: str) -> str | None:
    """Returns the number of the layer in a tensor's name as a string, or None outside layers."""
    before, layers, after = name.partition(".layers.")
    return after.partition(".")[0] if layers else None


# Layouts of whole checkpoint tensors, distributed over ranks.


def hf_layout(architecture: Architecture, ranks: tuple[int, ...], *, dtype: str = "float32") -> Layout:
    """Returns a layout with each whole tensor of `dtype` as a parameter. Ranks get consecutive tensors with about equal
    numbers of elements."""
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
    """Returns a result of `hf_layout` restricted to `rows` [tensors, 2], the first and the end row of every tensor.
    Each tensor with such rows becomes a parameter of shape [rows, columns]."""
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


# Overlaps between the boxes of two layouts, computed with arrays and without communication.

BOX = np.dtype([(name, np.int64) for name in BOX_FIELDS])


@dataclass(frozen=True, eq=False)
class Fragments:
    """The distinct boxes of a source layout, sorted by tensor and position. No two of them overlap.

    `holder_sets[holders[i]]` has the ranks with a copy of fragment i, ascending. `of_part[part]` [pieces] has the
    fragment number of every piece of a part.
    """

    boxes: Array
    holders: IntArray
    holder_sets: tuple[IntArray, ...]
    of_part: dict[int, IntArray]

    @cached_property
    def starts(self) -> IntArray:
        """The number of every fragment's first element, shape [fragments]. Elements of all fragments are numbered
        consecutively."""
        sizes = elements(self.boxes)
        starts: IntArray = np.cumsum(sizes) - sizes
        return starts


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Intersections of pieces and fragments, in the order of the pieces. Box i is shared by piece `piece[i]` and
    fragment `fragment[i]`."""

    boxes: Array
    piece: IntArray
    fragment: IntArray


def fragments_of(layout: Layout) -> Fragments:
    """Returns the distinct boxes of a source layout and their holders. Raises ValueError if two boxes of the source
    overlap without being equal."""
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
    """Returns the intersections of `pieces` with the source's fragments. Raises ValueError if the source lacks a part
    of a piece. The message names the tensor."""
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
    """Returns every non-empty intersection of `pieces` with `boxes`. `boxes` must be sorted by tensor."""
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
    """Returns (distinct boxes sorted by their fields, number of each given box among them)."""
    order = np.lexsort([boxes[name] for name in reversed(BOX_FIELDS)])
    ordered = boxes[order]
    new = np.ones(len(boxes), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(len(boxes), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return ordered[new], inverse


def set_numbers(member: IntArray, group: IntArray, num_groups: int) -> tuple[IntArray, list[tuple[int, ...]]]:
    """Numbers the distinct sets of members. Group i has the members `member[group == i]`. Returns (the set number of
    each group, the distinct sets as sorted tuples)."""
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
    """Returns the bytes of every box, shape [boxes]. `types` has the element type of every tensor."""
    sizes: IntArray = elements(boxes) * ITEM_BYTES[types[boxes["tensor"]]]
    return sizes


def offsets(pieces: Array, boxes: Array) -> IntArray:
    """Returns the first element of every box within the parameter of its piece. `pieces[i]` must contain `boxes[i]`."""
    rows: IntArray = boxes["row"] - pieces["row"]
    cols: IntArray = boxes["col"] - pieces["col"]
    begin: IntArray = rows * pieces["stride"] + cols + pieces["offset"]
    return begin


def describe(box: np.void, tensors: CanonicalTensors) -> str:
    row, col = int(box["row"]), int(box["col"])
    return f"{tensors.names[box['tensor']]}[{row}:{row + int(box['rows'])}, {col}:{col + int(box['cols'])}]"


def _sets_of(num_boxes: int, of_part: dict[int, IntArray]) -> tuple[IntArray, list[tuple[int, ...]]]:
    """Returns (the number of each box's set of parts, the sets)."""
    part = np.repeat(np.array(list(of_part), dtype=np.int64), [len(boxes) for boxes in of_part.values()])
    span = int(part.max()) + 1
    held = np.unique(np.concatenate(list(of_part.values())) * span + part)
    return set_numbers(held % span, held // span, num_boxes)


def _mixed(numbers: IntArray) -> np.ndarray:
    """Returns well-spread 64-bit keys, so sums over distinct sets differ. Uses the finaliser of splitmix64."""
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
