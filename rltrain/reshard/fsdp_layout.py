"""Where torch's fully_shard keeps a checkpoint's tensors, for every rank of a grid: the rows of each parameter of
transformers' model are dealt out evenly, rounded up, so that the last shards may be smaller or empty."""

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from math import prod

import numpy as np

from rltrain.models import Architecture, canonical_tensors, element_types
from rltrain.models.table import CanonicalTensors, IntArray
from rltrain.reshard.layout import PIECE, Layout, Parameters, RankLayout
from rltrain.runtime.grid import Grid

EXPERT = re.compile(
    r"(?P<block>.*)\.experts\.\d+\.(?P<matrix>gate_proj|w1|up_proj|w3|down_proj|w2)"
    r"(?:\.weight|(?P<adapter>\.lora_[AB]\.weight))"
)
STACKED = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "gate_up_proj", "w3": "gate_up_proj"}
STACKED |= {"down_proj": "down_proj", "w2": "down_proj"}
"""Which of transformers' parameters has an expert's matrix; it has those of all experts of a layer, gate above up.
Their low-rank adapters lie as they do, in parameters of their own."""
DECODER = "model."
"""Begins transformers' names of a decoder's parameters."""
BLOCKS = {"block_sparse_moe": "mlp"}
"""What transformers calls a block of experts that has another name in checkpoints."""


def fsdp_layout(architecture: Architecture, grid: Grid, *, dtype: str = "float32") -> Layout:
    """`dtype` is that of the shards: float32 of a model in training, whatever it computes in."""
    shards = len(grid.ranks) // (grid.copies or 1)
    return Layout(
        ranks=grid.ranks,
        parts=tuple(number % shards for number in range(len(grid.ranks))),
        tensors=canonical_tensors(architecture),
        types=element_types(architecture, dtype),
        build=partial(_shard, whole_parameters(architecture), shards),
    )


@dataclass(frozen=True, eq=False)
class WholeParameters:
    """Of transformers' model, and the canonical tensors that lie in them, each a run of whole rows; a vector's elements
    count as rows."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor: IntArray
    """[runs] the canonical tensor."""
    parameter: IntArray
    """[runs] where it lies, ascending."""
    first: IntArray
    """[runs] its first row there."""
    rows: IntArray
    """[runs]"""
    width: IntArray
    """[runs] elements of a row."""
    is_vector: np.ndarray
    """[runs]"""


@lru_cache(maxsize=8)
def whole_parameters(architecture: Architecture) -> WholeParameters:
    tensors = canonical_tensors(architecture)
    owners = [_owner(name, architecture.decoder_prefix) for name in tensors.names]
    order = sorted(range(len(owners)), key=_places(owners).__getitem__)
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    runs: list[tuple[int, int, int, int, int, bool]] = []
    for name, group in groupby(order, key=owners.__getitem__):
        members = [*group]
        begin = 0
        for tensor in members:
            shape = tensors.shapes[tensor]
            height, across = (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (shape[0], 1)
            runs.append((tensor, len(names), begin, height, across, len(shape) == 1))
            begin += height
        names.append(name)
        shapes.append(_stacked_shape(tensors, members))
    number, parameter, first, rows, width, is_vector = (np.array(column) for column in zip(*runs, strict=True))
    return WholeParameters(tuple(names), tuple(shapes), number, parameter, first, rows, width, is_vector)


def _owner(tensor: str, prefix: str) -> str:
    """The parameter of transformers' language model that a checkpoint's tensor lies in, whose decoder's names begin
    with `prefix` there."""
    if tensor.startswith(prefix):
        tensor = DECODER + tensor.removeprefix(prefix)
    found = EXPERT.fullmatch(tensor)
    name = tensor
    if found:
        name = f"{found['block']}.experts.{STACKED[found['matrix']]}{found['adapter'] or ''}"
    for block, renamed in BLOCKS.items():
        name = name.replace(f".{block}.", f".{renamed}.")
    return name


def _places(owners: list[str]) -> list[int]:
    """[tensors] by which they are sorted so that those of one parameter lie together, else in their order."""
    first: dict[str, int] = {}
    return [first.setdefault(owner, number) for number, owner in enumerate(owners)]


def _stacked_shape(tensors: CanonicalTensors, members: list[int]) -> tuple[int, ...]:
    shape = tensors.shapes[members[0]]
    if EXPERT.fullmatch(tensors.names[members[0]]) is None:
        return shape
    num_experts = len({tensors.names[member].split(".experts.")[1].split(".")[0] for member in members})
    return num_experts, shape[0] * len(members) // num_experts, shape[1]


def _shard(whole: WholeParameters, shards: int, part: int) -> RankLayout:
    """Share `part` of `shards`."""
    outer = np.array([shape[0] for shape in whole.shapes], dtype=np.int64)
    inner = np.array([shape[1] if len(shape) == 3 else 1 for shape in whole.shapes], dtype=np.int64)
    each = -(-outer // shards)
    start, stop = np.minimum(part * each, outer), np.minimum((part + 1) * each, outer)
    of = whole.parameter
    low = np.maximum(whole.first, (start * inner)[of])
    high = np.minimum(whole.first + whole.rows, (stop * inner)[of])
    kept = np.flatnonzero(low < high)
    is_held = stop > start
    number = np.cumsum(is_held) - 1
    row, count, vector = (low - whole.first)[kept], (high - low)[kept], whole.is_vector[kept]
    pieces = np.zeros(len(kept), dtype=PIECE)
    pieces["tensor"], pieces["parameter"] = whole.tensor[kept], number[of[kept]]
    pieces["row"], pieces["col"] = np.where(vector, 0, row), np.where(vector, row, 0)
    pieces["rows"] = np.where(vector, 1, count)
    pieces["cols"] = pieces["stride"] = np.where(vector, count, whole.width[kept])
    pieces["offset"] = (low - (start * inner)[of])[kept] * whole.width[kept]
    return RankLayout(partial(_parameters, whole, start, stop), pieces)


def _parameters(whole: WholeParameters, start: IntArray, stop: IntArray) -> Parameters:
    """Those of which a share has something."""
    return tuple(
        (name, (int(last - first), *shape[1:]))
        for name, shape, first, last in zip(whole.names, whole.shapes, start, stop, strict=True)
        if last > first
    )
