"""What a layout is: for every rank, which boxes of the checkpoint's tensors lie where in its parameters; and which
boxes of two layouts overlap.

Canonical tensors are those of a Hugging Face checkpoint, seen as two-dimensional: [n] is [1, n].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from rltrain.models import Architecture, canonical_tensors, element_types
from rltrain.models.table import ITEM_BYTES, Array, CanonicalTensors, IntArray, TypeArray

Parameters = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and local shapes."""

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
"""A box of canonical tensor number `tensor` that lies in local parameter number `parameter`, beginning at element
`offset`, rows `stride` elements apart, columns adjacent."""


class RankLayout:
    """One rank's parameters (name and local shape) and the pieces that lie in them.

    Elements that no piece covers are padding: they are zeroed when the parameters are made and never written again.
    Planning reads the pieces of all ranks but the parameters of its own only, so those may be given as a function.
    """

    def __init__(self, parameters: Parameters | Callable[[], Parameters], pieces: Array) -> None:
        self._parameters = parameters
        self.pieces = pieces

    @cached_property
    def parameters(self) -> Parameters:
        return self._parameters() if callable(self._parameters) else self._parameters


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a model's tensors lie on `ranks`. `parts[i]` is the share that `ranks[i]` holds: replicas have equal parts.

    `types` [tensors] is the element type of every canonical tensor on this side. `build` is a pure function from a part
    to its contents, so every rank can work out what any other rank holds.
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
        """The share of `rank`, which must be one of `ranks`."""
        return self.part(self.parts[self.ranks.index(rank)])


@dataclass(frozen=True)
class Segment:
    """`count` consecutive rows of one tensor (elements of a vector) from `first`; `tensor` counts within its group."""

    tensor: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Shard:
    """One local parameter: name, shape and its pieces, whose `tensor` counts from the first tensor of its group."""

    name: str
    shape: tuple[int, ...]
    pieces: Array


def window(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """What [start, stop) covers of the sequence that `segments` make up one after another."""
    kept, position = [], 0
    for segment in segments:
        low, high = max(start, position), min(stop, position + segment.count)
        if low < high:
            kept.append(Segment(segment.tensor, segment.first + low - position, high - low))
        position += segment.count
    return kept


def stacked(name: str, segments: list[Segment], length: int, width: int | None) -> Shard:
    """A parameter of `length` rows of `width` columns that begins with `segments`, one below the other.

    `width` None makes it a vector of `length` elements. What the segments leave over at the end is padding.
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
    """A parameter that holds `count` columns from `first` of a tensor of `rows` rows."""
    pieces = np.zeros(1, dtype=PIECE)
    pieces["col"], pieces["rows"], pieces["cols"], pieces["stride"] = first, rows, count, count
    return Shard(name, (rows, count), pieces)


def below(upper: Shard, lower: Shard) -> Shard:
    """One parameter that holds `lower` below `upper`, which has as many columns and the same name."""
    pieces = np.concatenate([upper.pieces, lower.pieces])
    pieces["offset"][len(upper.pieces) :] += int(np.prod(upper.shape))
    return Shard(upper.name, (upper.shape[0] + lower.shape[0], *upper.shape[1:]), pieces)


# A layout as several of some parameters each, so that a reshard can be carried out piecemeal through little memory.

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


# A reshard piecemeal by canonical tensors, for sources that are made when they are asked for.

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


# Whole tensors of a checkpoint as a layout, shared out over ranks.


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


# Which boxes of a destination layout overlap which boxes of a source layout. Arrays only, nothing is communicated.

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
