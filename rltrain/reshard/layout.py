"""What a layout is: for every rank, which boxes of the checkpoint's tensors lie where in its parameters.

Canonical tensors are those of a Hugging Face checkpoint, seen as two-dimensional: [n] is [1, n].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.models.table import Array, CanonicalTensors, TypeArray

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
