"""What tensor and pipeline parallelism have in common on either side: cutting a family's table for one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rltrain.reshard.families import Architecture, Row, canonical_tensors, table_of
from rltrain.reshard.families.table import sizes
from rltrain.reshard.layout import Array, RankLayout, Segment, Shard, column_slice, stacked, window


@dataclass(frozen=True)
class TensorShare:
    """Share `index` of `size` equal ones. `qkv` are the rows of the fused attention projection that it holds, in its
    order; the `padded_vocab_size` rows of the vocabulary are dealt out evenly."""

    index: int
    size: int
    qkv: Sequence[Segment]
    padded_vocab_size: int


@dataclass(frozen=True)
class Stage:
    """The consecutive layers and the ends of the model that a pipeline stage holds."""

    layers: range
    embedding: bool
    head: bool


def even_share(count: int, index: int, size: int, what: str) -> tuple[int, int]:
    """(first, count) of part `index` of `size` equal parts of `count`."""
    if count % size:
        raise ValueError(f"{what} ({count}) cannot be split into {size} equal parts")
    return index * (count // size), count // size


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def build_rank(
    architecture: Architecture, stage: Stage, share: TensorShare, name_of: Callable[[Row], str]
) -> RankLayout:
    """The parameters of one rank; the names of `name_of` number layers from 0 within the stage."""
    table, tensors = table_of(architecture), canonical_tensors(architecture)
    size = sizes(architecture)
    contents = _Contents(lambda row: _cut(row, name_of(row), size, share))
    if stage.embedding:
        contents.add(table.embedding, tensors.numbers[table.embedding.parts[0].name])
    contents.add_layers(table.layer, tensors.numbers[table.embedding.parts[0].name] + 1, stage.layers)
    if stage.head:
        contents.add(table.final_norm, tensors.numbers[table.final_norm.parts[0].name])
        head = table.embedding if architecture.tied_embeddings else table.head
        if not (architecture.tied_embeddings and stage.embedding):
            contents.add(table.head, tensors.numbers[head.parts[0].name])
    return RankLayout(tuple(contents.parameters), np.concatenate(contents.pieces))


class _Contents:
    """Collects parameters and pieces; cuts a layer once and repeats it, so that the cost does not grow with depth."""

    def __init__(self, cut: Callable[[Row], Shard]) -> None:
        self.cut = cut
        self.parameters: list[tuple[str, tuple[int, ...]]] = []
        self.pieces: list[Array] = []

    def add(self, row: Row, tensor: int) -> None:
        shard = self.cut(row)
        self.pieces.append(_moved(shard.pieces, tensor, len(self.parameters)))
        self.parameters.append((shard.name, shard.shape))

    def add_layers(self, rows: Sequence[Row], first_tensor: int, layers: range) -> None:
        shards = [self.cut(row) for row in rows]
        tensors = np.cumsum([0, *(len(row.parts) for row in rows)])
        layer = np.concatenate([_moved(s.pieces, tensors[i], i) for i, s in enumerate(shards)])
        repeated = np.tile(layer, len(layers))
        repeated["tensor"] += np.repeat(first_tensor + np.array(layers) * tensors[-1], len(layer)).astype(np.int32)
        first_parameter = len(self.parameters)
        repeated["parameter"] += np.repeat(first_parameter + np.arange(len(layers)) * len(rows), len(layer)).astype(
            np.int32
        )
        self.pieces.append(repeated)
        self.parameters += [(s.name.format(layer=i), s.shape) for i in range(len(layers)) for s in shards]


def _moved(pieces: Array, tensors: int, parameters: int) -> Array:
    moved = pieces.copy()
    moved["tensor"] += tensors
    moved["parameter"] += parameters
    return moved


def _cut(row: Row, name: str, size: dict[str, int], share: TensorShare) -> Shard:
    """The share's parameter for `row`; tensors are numbered within the row."""
    shapes = [tuple(size[dimension] for dimension in part.dimensions) for part in row.parts]
    width = shapes[0][1] if len(shapes[0]) == 2 else None
    if row.split == "columns":
        assert width is not None, f"{name}: a vector has no columns to split"
        return column_slice(name, shapes[0][0], *even_share(width, share.index, share.size, f"columns of {name}"))
    if row.split == "vocab":
        first, length = even_share(share.padded_vocab_size, share.index, share.size, "padded vocabulary")
        segments = window([Segment(0, 0, shapes[0][0])], first, first + length)
        return stacked(name, segments, length, width)
    if row.split == "qkv":
        segments = list(share.qkv)
    elif row.split == "gate_up":
        shares = [even_share(shape[0], share.index, share.size, f"rows of {name}") for shape in shapes]
        segments = [Segment(part, first, count) for part, (first, count) in enumerate(shares)]
    else:
        segments = [Segment(0, 0, shapes[0][0])]
    return stacked(name, segments, sum(segment.count for segment in segments), width)
