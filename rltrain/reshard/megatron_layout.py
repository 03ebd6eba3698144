"""Cuts a family's table for one part of a layout, and describes the layout of Megatron's modules."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby
from math import prod
from typing import Literal

import numpy as np

from rltrain.models import (
    Architecture,
    Layer,
    LayerKind,
    Row,
    Split,
    canonical_tensors,
    element_types,
    first_tensors,
    layer_of,
    prediction_layer,
    sizes,
    table_of,
    tensors_in,
    tower_rows,
)
from rltrain.models.lora import ADAPTER_A, ADAPTER_B, A, B
from rltrain.models.table import Array, IntArray
from rltrain.reshard.layout import (
    PIECE,
    Layout,
    Parameters,
    RankLayout,
    Segment,
    Shard,
    below,
    column_slice,
    stacked,
    window,
)
from rltrain.runtime.grid import Grid

# The cut of a family's table for one part of a layout, for training and for engines.

NO_PIECES = np.zeros(0, dtype=PIECE)


@dataclass(frozen=True)
class TensorShare:
    """The share `index` of `size` equal ones. `qkv` are its rows of the fused attention projection, in order. The
    `padded_vocab_size` rows of the vocabulary are divided evenly."""

    index: int
    size: int
    qkv: Sequence[Segment] = ()
    padded_vocab_size: int = 0


@dataclass(frozen=True)
class ExpertShare:
    """A share of the experts: `count` of every layer, from `first` on, and of each expert share `index` of `size` equal
    ones."""

    first: int
    count: int
    index: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """A module of one pipeline stage, with consecutive layers and maybe an end of the model.

    The names of its parameters begin with `prefix` and number layers from 0.
    """

    layers: range
    embedding: bool
    head: bool
    prefix: str = ""
    prediction: bool = False
    """Whether a chunk with the head also has the layer for predicting a further token. It then has the embedding
    too."""


@dataclass(frozen=True)
class Side:
    """The parameter name of a row and its split, in training or in an engine."""

    name: Callable[[Row], str]
    split: Callable[[Row], Split]


@dataclass(frozen=True, eq=False)
class Template:
    """A layer's parameters with "{layer}" in their names, and its pieces. Pieces count tensors and parameters from
    0."""

    parameters: Parameters
    pieces: Array


def even_share(count: int, index: int, size: int, what: str) -> tuple[int, int]:
    """Returns (first, count) of part `index` of `size` equal parts of `count`. Raises ValueError if it cannot be
    divided."""
    if count % size:
        raise ValueError(f"{what} ({count}) cannot be split into {size} equal parts")
    return index * (count // size), count // size


def expert_share(architecture: Architecture, ep: tuple[int, int], tp: tuple[int, int]) -> ExpertShare:
    """Returns the experts of expert-parallel rank (index, size) `ep`, and within each expert the share of `tp`."""
    first, count = even_share(architecture.num_experts, *ep, "experts")
    return ExpertShare(first, count, *tp)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class ModelCutter:
    """A maker of the parts of one layout. A part is the RankLayout of a rank and of all its replicas.

    Each kind of layer is cut once per share and repeated. So the cost of a part does not grow with the depth of the
    model or the number of its experts.
    """

    def __init__(self, architecture: Architecture, side: Side) -> None:
        self.architecture = architecture
        self.side = side
        self._sizes = sizes(architecture)
        self._layers: dict[tuple[LayerKind, int, ExpertShare | None], Template] = {}

    def cut(self, chunks: Sequence[Chunk], share: TensorShare, experts: ExpertShare | None) -> RankLayout:
        """Returns the RankLayout of a rank with `chunks` of the model.

        `share` is the rank's tensor-parallel share of all tensors except those of experts. `experts` is its share of
        the experts. It may be None only if `chunks` have no experts.
        """
        table, first = table_of(self.architecture), first_tensors(self.architecture)
        tied = self.architecture.tied_embeddings
        contents = _Contents()
        for chunk in chunks:
            if chunk.embedding:
                contents.add(chunk.prefix, self._template((table.embedding,), share), np.array([0]))
            for kind, layers in _runs(self.architecture.layer_kinds, chunk.layers):
                template = self._layer(kind, share, experts)
                contents.add(
                    chunk.prefix, template, first[layers.start : layers.stop], layers.start - chunk.layers.start
                )
            if chunk.head:
                contents.add(chunk.prefix, self._template(table.final_norm, share), first[-1:])
                if not (tied and any(chunk.embedding for chunk in chunks)):
                    after_norm = first[-1:] + tensors_in(table.final_norm)
                    head = after_norm if not tied else np.array([0])  # tied: the embedding, on another stage
                    contents.add(chunk.prefix, self._template((table.head,), share), head)
            if chunk.prediction:
                self._add_prediction(contents, chunk, share, experts)
            if chunk.embedding:
                self._add_tower(contents, chunk, share)
        return contents.finished()

    def _add_prediction(
        self, contents: "_Contents", chunk: Chunk, share: TensorShare, experts: ExpertShare | None
    ) -> None:
        if not chunk.embedding:
            contents.add(chunk.prefix, self._template((table_of(self.architecture).embedding,), share), np.array([0]))
        layer = prediction_layer(self.architecture)
        template, num_tensors = self._template(layer.rows, share), tensors_in(layer.rows)
        if layer.experts:
            assert experts is not None
            template = _beside(template, self._experts(layer, experts), num_tensors)
            num_tensors += tensors_in(layer.experts) * layer.expert_copies(self.architecture.num_experts)
        of_tower = sum(tensors_in(rows) for rows, _ in tower_rows(self.architecture))
        first = len(canonical_tensors(self.architecture).names) - of_tower - num_tensors
        contents.add(chunk.prefix, template, np.array([first]))

    def _add_tower(self, contents: "_Contents", chunk: Chunk, share: TensorShare) -> None:
        """Adds the vision tower. Its tensors are the last ones."""
        num_tensors = len(canonical_tensors(self.architecture).names)
        of_tower = tower_rows(self.architecture)
        first = num_tensors - sum(tensors_in(rows) for rows, _ in of_tower)
        for rows, block in of_tower:
            contents.add(chunk.prefix, self._template(rows, share), np.array([first]), block)
            first += tensors_in(rows)

    def _layer(self, kind: LayerKind, share: TensorShare, experts: ExpertShare | None) -> Template:
        key = (kind, share.index, experts if kind.sparse else None)
        if key not in self._layers:
            layer = layer_of(self.architecture, kind)
            template = self._template(layer.rows, share)
            if kind.sparse:
                assert experts is not None
                template = _beside(template, self._experts(layer, experts), tensors_in(layer.rows))
            self._layers[key] = template
        return self._layers[key]

    def _template(self, rows: Sequence[Row], share: TensorShare) -> Template:
        shards = self._shards(rows, share)
        pieces = np.concatenate([NO_PIECES, *(shard.pieces for shard in shards)])
        pieces["parameter"] = np.repeat(np.arange(len(shards)), [len(shard.pieces) for shard in shards])
        return Template(tuple((shard.name, shard.shape) for shard in shards), pieces)

    def _experts(self, layer: Layer, share: ExpertShare) -> Template:
        """Returns all experts of the share. One is cut and repeated, as separate parameters or stacked in one
        parameter."""
        rows = layer.experts
        if not rows:
            return Template((), NO_PIECES)
        one = self._shards(rows, TensorShare(share.index, share.size))
        own = np.array(["{expert}" in shard.name for shard in one])
        parameter = np.repeat(np.arange(len(one)), [len(shard.pieces) for shard in one])
        first_parameter = np.cumsum([0, *np.where(own, share.count, 1)])
        elements = np.array([int(np.prod(shard.shape)) for shard in one])
        expert = np.arange(share.count)[:, None]
        pieces = np.empty((share.count, len(parameter)), dtype=PIECE)
        pieces[:] = np.concatenate([shard.pieces for shard in one])
        if layer.stacked:
            shapes = [part.shape(self._sizes) for row in rows for part in row.parts]
            heights = np.array([shape[0] if len(shape) > 1 else 1 for shape in shapes])
            pieces["row"] += (share.first + expert) * heights[pieces["tensor"]]
        else:
            pieces["tensor"] += (share.first + expert) * tensors_in(rows)
        pieces["parameter"] = first_parameter[parameter] + expert * own[parameter]
        pieces["offset"] += expert * np.where(own, 0, elements)[parameter]
        named: list[tuple[str, tuple[int, ...]]] = []
        for shard in one:
            if "{expert}" in shard.name:
                named += [(shard.name.replace("{expert}", str(i)), shard.shape) for i in range(share.count)]
            else:
                named.append((shard.name, (share.count, *shard.shape)))
        return Template(tuple(named), pieces.reshape(-1))

    def _shards(self, rows: Sequence[Row], share: TensorShare) -> list[Shard]:
        """Returns the share's parameters of `rows`. Tensors are numbered consecutively."""
        shards: list[Shard] = []
        num_tensors = 0
        for row in (row for row in rows if row.parts):
            shard = _cut(row, self.side.name(row), self.side.split(row), self._sizes, share)
            shard.pieces["tensor"] += num_tensors
            num_tensors += len(row.parts)
            if shards and shards[-1].name == shard.name:
                shards[-1] = below(shards[-1], shard)
            else:
                shards.append(shard)
        return shards


class _Contents:
    """The templates of a part, collected one by one."""

    def __init__(self) -> None:
        self._added: list[tuple[str, Template, IntArray, int]] = []

    def add(self, prefix: str, template: Template, tensors: IntArray, first_layer: int = 0) -> None:
        """Adds `template` once for each of `tensors`, the numbers of its first tensors."""
        self._added.append((prefix, template, tensors, first_layer))

    def finished(self) -> RankLayout:
        pieces = np.empty(sum(len(tensors) * len(template.pieces) for _, template, tensors, _ in self._added), PIECE)
        num_pieces = num_parameters = 0
        for _, template, tensors, _ in self._added:
            count = len(tensors) * len(template.pieces)
            copies = pieces[num_pieces : num_pieces + count].reshape(len(tensors), len(template.pieces))
            # As bytes, because numpy copies records field by field and takes ten times as long.
            copies.view(np.uint8)[:] = template.pieces.view(np.uint8)
            copies["tensor"] += tensors[:, None]
            copies["parameter"] += num_parameters + np.arange(len(tensors))[:, None] * len(template.parameters)
            num_pieces += count
            num_parameters += len(tensors) * len(template.parameters)
        return RankLayout(self._named, pieces)

    def _named(self) -> Parameters:
        return tuple(
            (prefix + name.format(layer=first_layer + i), shape)
            for prefix, template, tensors, first_layer in self._added
            for i in range(len(tensors))
            for name, shape in template.parameters
        )


def _runs(kinds: Sequence[LayerKind], layers: range) -> list[tuple[LayerKind, range]]:
    """Returns `layers` as runs of consecutive layers of one kind."""
    runs: list[tuple[LayerKind, range]] = []
    for layer in layers:
        if runs and runs[-1][0] == kinds[layer]:
            runs[-1] = (kinds[layer], range(runs[-1][1].start, layer + 1))
        else:
            runs.append((kinds[layer], range(layer, layer + 1)))
    return runs


def _beside(first: Template, second: Template, num_tensors: int) -> Template:
    """Returns both templates together. The tensors of `second` follow the `num_tensors` of `first`."""
    pieces = np.concatenate([first.pieces, second.pieces])
    pieces["tensor"][len(first.pieces) :] += num_tensors
    pieces["parameter"][len(first.pieces) :] += len(first.parameters)
    return Template(first.parameters + second.parameters, pieces)


def _cut(row: Row, name: str, split: Split, size: dict[str, int], share: TensorShare) -> Shard:
    """Returns the share's parameter for `row`. Tensors are numbered within the row."""
    shapes = [part.shape(size) for part in row.parts]
    if prod(shapes[0][1:-1]) > 1:
        return _whole(name, shapes)
    width = shapes[0][-1] if len(shapes[0]) > 1 else None
    if split == "columns":
        assert width is not None, f"{name}: a vector has no columns to split"
        return column_slice(name, shapes[0][0], *even_share(width, share.index, share.size, f"columns of {name}"))
    if split == "vocab":
        first, length = even_share(share.padded_vocab_size, share.index, share.size, "padded vocabulary")
        segments = window([Segment(0, 0, shapes[0][0])], first, first + length)
        return stacked(name, segments, length, width)
    sections = _sections(row, size)
    if split == "qkv":
        segments = [piece for of in share.qkv for piece in window(sections[of.tensor], of.first, of.first + of.count)]
    elif split == "rows":
        segments = []
        for section in sections:
            num_rows = sum(segment.count for segment in section)
            first, count = even_share(num_rows, share.index, share.size, f"rows of {name}")
            segments += window(section, first, first + count)
    else:
        segments = [segment for section in sections for segment in section]
    return stacked(name, segments, sum(segment.count for segment in segments), width)


def _whole(name: str, shapes: Sequence[tuple[int, ...]]) -> Shard:
    """Returns a parameter with a whole tensor of more than two dimensions. Only such tensors are not split."""
    (shape,) = shapes
    num_rows = prod(shape[:-1])
    return replace(stacked(name, [Segment(0, 0, num_rows)], num_rows, shape[-1]), shape=shape)


def _sections(row: Row, size: dict[str, int]) -> list[list[Segment]]:
    """Returns the sections to be split one by one. They are the tensors of a row, or sections of their rows."""
    return [
        [Segment(number, first, count) for first, count in section]
        for number, part in enumerate(row.parts)
        for section in part.sections(size)
    ]


# Pairs of low-rank adapters A and B in a layout. One parameter may have the adapters of several matrices.

_A_NAME = re.compile(rf"(?P<adapted>.+){re.escape(ADAPTER_A)}(?P<expert>\d*)")


@dataclass(frozen=True)
class AdapterPair:
    """The adapters `a` [parts * rank, inputs] and `b` [outputs, rank]. Stacked experts add a first dimension."""

    adapted: str
    """The layer or the parameter with these adapters."""
    expert: str
    """The number of the expert, if each expert of a layer has separate parameters. Otherwise empty."""
    a: tuple[int, ...]
    b: tuple[int, ...]
    segments: tuple[Segment, ...]
    """Rows of `b`, in order. `tensor` is the number of their part of `a`."""
    cut: Literal["rows", "columns", None]
    """The cut of the matrices: by rows, like `b`, or by columns, like `a`."""

    @property
    def names(self) -> tuple[str, str]:
        return self.adapted + ADAPTER_A + self.expert, self.adapted + ADAPTER_B + self.expert

    @property
    def num_parts(self) -> int:
        return self.a[-2] // self.b[-1]

    @property
    def rows_of_parts(self) -> list[int]:
        """Rows of `b` for each part of `a`. Raises ValueError unless the rows of a part are together and parts are in
        order."""
        runs = [(part, [*run]) for part, run in groupby(self.segments, key=lambda segment: segment.tensor)]
        if [part for part, _ in runs] != [*range(self.num_parts)]:
            raise ValueError(f"{self.adapted}: the rows of its adapters are not in the order of its parts")
        return [sum(segment.count for segment in run) for _, run in runs]


def adapter_pairs(layout: Layout, rank: int) -> list[AdapterPair]:
    """Returns the adapter pairs of `rank`, in the order of its parameters."""
    mine, tensors = layout.on(rank), layout.tensors.names
    shapes: Mapping[str, tuple[int, ...]] = dict(mine.parameters)
    boxes: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    names, ones = [*shapes], [prod(shape[-2:]) for shape in shapes.values()]
    for parameter, offset, tensor, rows in zip(
        *(mine.pieces[field].tolist() for field in ("parameter", "offset", "tensor", "rows")), strict=True
    ):
        if offset < ones[parameter]:  # the first of stacked experts is enough
            boxes[names[parameter]].append((offset, tensor, rows))
    found = []
    for name in names:
        if (matched := _A_NAME.fullmatch(name)) is None:
            continue
        adapted, expert = matched["adapted"], matched["expert"]
        other = adapted + ADAPTER_B + expert
        part = {tensors[tensor]: number for number, (_, tensor, _) in enumerate(sorted(boxes[name]))}
        width = shapes[other][-1]
        segments = tuple(
            Segment(part[tensors[tensor].removesuffix(B) + A], offset // width, rows)
            for offset, tensor, rows in sorted(boxes[other])
        )
        cut = _cut_of_adapters(layout, part, shapes[name], shapes[other])
        found.append(AdapterPair(adapted, expert, shapes[name], shapes[other], segments, cut))
    return found


def _cut_of_adapters(
    layout: Layout, parts: Iterable[str], a: tuple[int, ...], b: tuple[int, ...]
) -> Literal["rows", "columns", None]:
    """Returns the cut of adapters, given the shapes on one rank. `parts` are the tensors of their A."""
    whole = [layout.tensors.shapes[layout.tensors.numbers[name]] for name in parts]
    if a[-1] < whole[0][1]:
        return "columns"
    others = [layout.tensors.numbers[name.removesuffix(A) + B] for name in parts]
    return "rows" if b[-2] < sum(layout.tensors.shapes[number][0] for number in others) else None


# The layout of Megatron's modules, for every rank of a grid.

VOCAB_ROWS_MULTIPLE = 16
"""A rank's rows of the vocabulary are a multiple of this, as tensor cores want for any dtype."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Returns the rows of the vocabulary over all tensor-parallel ranks, padding included."""
    return round_up(vocab_size, VOCAB_ROWS_MULTIPLE * tp)


def megatron_layout(
    architecture: Architecture,
    grid: Grid,
    *,
    dtype: str = "float32",
    transformer_engine: bool = False,
) -> Layout:
    """Returns the layout of Megatron's modules on `grid`. `dtype` is the type of the parameters. `transformer_engine`
    chooses the names of its fused layers and grouped experts.

    With `grid.vpp` above 1, a rank holds so many chunks of the model. Their names begin with their numbers
    ("0.decoder...").

    `grid.tp` must divide the query heads. It must also divide the KV heads or be a multiple of them. `grid.ep` must
    divide the experts. Raises ValueError if something does not divide.
    """
    parts = _Parts(architecture, grid, transformer_engine, chunks_of(architecture, grid))
    return Layout(
        ranks=grid.ranks,
        parts=tuple(map(parts.number, grid.ranks)),
        tensors=canonical_tensors(architecture),
        types=element_types(architecture, dtype),
        build=parts.build,
    )


def chunks_of(architecture: Architecture, grid: Grid) -> tuple[tuple[Chunk, ...], ...]:
    """Returns the chunks of every stage, [grid.pp][grid.vpp], as in megatron_layout."""
    pp, num_chunks = grid.pp, grid.pp * grid.vpp
    if grid.vpp > 1 and pp == 1:
        raise ValueError(f"vpp is {grid.vpp} with pp 1; expected 1: there is no pipeline to interleave")
    counts = grid.layers_of_chunks(architecture.num_layers)
    ends = list(accumulate(counts))
    chunks = [
        Chunk(
            range(end - count, end),
            embedding=number == 0,
            head=number == num_chunks - 1,
            prefix=f"{number // pp}." if grid.vpp > 1 else "",
            prediction=number == num_chunks - 1 and bool(architecture.predicts),
        )
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    return tuple(tuple(chunks[stage::pp]) for stage in range(pp))


class _Parts:
    """The distinct shares of a grid's ranks, with their numbers and contents.

    A share is determined by the pipeline stage and the coordinate in tensor parallelism. If the stage has experts, the
    coordinates in expert parallelism and in its tensor parallelism count too.
    """

    def __init__(
        self, architecture: Architecture, grid: Grid, transformer_engine: bool, chunks: tuple[tuple[Chunk, ...], ...]
    ) -> None:
        even_share(architecture.num_heads, 0, grid.tp, "attention heads")
        self.architecture, self.grid, self.chunks = architecture, grid, chunks
        self.tp, self.ep, self.etp = grid.tp, grid.ep, grid.etp or grid.tp
        self.share = cache(self._share)
        self.cutter = ModelCutter(architecture, TRANSFORMER_ENGINE if transformer_engine else LOCAL)

    def number(self, rank: int) -> int:
        at = self.grid.coordinates(rank)
        number = at.pp * self.tp + at.tp
        if not self.architecture.moe:
            return number
        if not self._has_experts(at.pp):
            return number * self.ep * self.etp
        expert = self.grid.expert_coordinates(rank)
        return (number * self.ep + expert.ep) * self.etp + expert.etp

    def build(self, part: int) -> RankLayout:
        experts = None
        if self.architecture.moe:
            part, etp = divmod(part, self.etp)
            part, ep = divmod(part, self.ep)
            experts = expert_share(self.architecture, (ep, self.ep), (etp, self.etp))
        stage, tp = divmod(part, self.tp)
        return self.cutter.cut(self.chunks[stage], self.share(tp), experts)

    def _has_experts(self, stage: int) -> bool:
        sparse = self.architecture.sparse_layers
        chunks = self.chunks[stage]
        return any(sparse[layer] for chunk in chunks for layer in chunk.layers) or any(
            chunk.prediction and self.architecture.predicting_kind.sparse for chunk in chunks
        )

    def _share(self, index: int) -> TensorShare:
        rows = () if self.architecture.mla else _fused_rows(self.architecture, index, self.tp)
        return TensorShare(index, self.tp, rows, padded_vocab_size(self.architecture.vocab_size, self.tp))


def _local_split(row: Row) -> Split:
    return row.split_local or row.split


def _te_name(row: Row) -> str:
    return row.megatron_te or row.megatron


LOCAL = Side(name=lambda row: row.megatron, split=_local_split)
TRANSFORMER_ENGINE = Side(name=_te_name, split=lambda row: row.split)


def _fused_rows(architecture: Architecture, index: int, tp: int) -> list[Segment]:
    """Returns one of `tp` equal parts of the rows of linear_qkv.

    For each KV group the rows are its query heads, with `gated_attention` their gates, its key head, and its value
    head. Cuts are inside a group if `tp` exceeds the KV heads.
    """
    head = architecture.head_dim
    group = architecture.query_size // architecture.num_kv_heads
    widths = [group, group, head, head] if architecture.gated_attention else [group, head, head]
    fused = [
        Segment(section, kv * width, width)
        for kv in range(architecture.num_kv_heads)
        for section, width in enumerate(widths)
    ]
    first, count = even_share(sum(segment.count for segment in fused), index, tp, "rows of linear_qkv")
    return window(fused, first, first + count)
