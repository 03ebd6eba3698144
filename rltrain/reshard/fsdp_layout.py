"""The layout of torch's fully_shard, for every rank of a grid. The rows of each parameter of transformers' model are
divided evenly, rounded up. So the last shards may be smaller or empty."""

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from math import prod

import numpy as np

from rltrain.models import Architecture, canonical_tensors, element_types
from rltrain.models.table import NESTED_PREFIX, NESTED_TOWER_PREFIX, CanonicalTensors, IntArray
from rltrain.reshard.layout import PIECE, Layout, Parameters, RankLayout
from rltrain.runtime.grid import Grid

EXPERT = re.compile(
    r"(?P<block>.*)\.experts\.\d+\.(?P<matrix>gate_proj|w1|up_proj|w3|down_proj|w2)"
    r"(?:\.weight|(?P<adapter>\.lora_[AB]\.weight))"
)
STACKED = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "gate_up_proj", "w3": "gate_up_proj"}
STACKED |= {"down_proj": "down_proj", "w2": "down_proj"}
"""The parameter of transformers for each matrix of an expert. It has the matrices of all experts of a layer, gate above
up. Their low-rank adapters are stacked alike, in separate parameters."""
DECODER = "model."
"""The beginning of transformers' names for a decoder's parameters."""
BLOCKS = {"block_sparse_moe": "mlp"}
"""Blocks of experts with another name in checkpoints, and transformers' name for each."""


def fsdp_layout(architecture: Architecture, grid: Grid, *, dtype: str = "float32") -> Layout:
    """Returns the layout of FSDP on `grid`. `dtype` is the type of the shards. For a model in training it is float32,
    even if it computes in another type."""
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
    """Parameters of transformers' model and their canonical tensors. Each tensor is a run of whole rows. A vector's
    elements count as rows."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor: IntArray
    """The canonical tensor of each run, shape [runs]."""
    parameter: IntArray
    """The parameter of each run, ascending, shape [runs]."""
    first: IntArray
    """The first row of each run in its parameter, shape [runs]."""
    rows: IntArray
    """The rows of each run, shape [runs]."""
    width: IntArray
    """The elements of a row of each run, shape [runs]."""
    is_vector: np.ndarray
    """Whether each run is a vector, shape [runs]."""


@lru_cache(maxsize=8)
def whole_parameters(architecture: Architecture) -> WholeParameters:
    tensors = canonical_tensors(architecture)
    owners = [_owner(name, architecture) for name in tensors.names]
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


def _owner(tensor: str, architecture: Architecture) -> str:
    """Returns the parameter of transformers' model for a checkpoint's tensor. With model.vision the model is one for
    images, even in a layout without its tower."""
    vision, decoder = architecture.vision, DECODER
    if vision and tensor.startswith(vision.prefix):
        return NESTED_TOWER_PREFIX + tensor.removeprefix(vision.prefix)
    if architecture.mrope and architecture.head == "vocabulary":
        decoder = NESTED_PREFIX
    if tensor.startswith(architecture.decoder_prefix):
        tensor = decoder + tensor.removeprefix(architecture.decoder_prefix)
    found = EXPERT.fullmatch(tensor)
    name = tensor
    if found:
        name = f"{found['block']}.experts.{STACKED[found['matrix']]}{found['adapter'] or ''}"
    for block, renamed in BLOCKS.items():
        name = name.replace(f".{block}.", f".{renamed}.")
    return name


def _places(owners: list[str]) -> list[int]:
    """Returns sort keys, shape [tensors]. They put the tensors of one parameter together and otherwise keep the
    order."""
    first: dict[str, int] = {}
    return [first.setdefault(owner, number) for number, owner in enumerate(owners)]


def _stacked_shape(tensors: CanonicalTensors, members: list[int]) -> tuple[int, ...]:
    shape = tensors.shapes[members[0]]
    if EXPERT.fullmatch(tensors.names[members[0]]) is None:
        return shape
    num_experts = len({tensors.names[member].split(".experts.")[1].split(".")[0] for member in members})
    return num_experts, shape[0] * len(members) // num_experts, shape[1]


def _shard(whole: WholeParameters, shards: int, part: int) -> RankLayout:
    """Returns share `part` of `shards`."""
    outer = np.array([shape[0] for shape in whole.shapes], dtype=np.int64)
    inner = np.array([prod(shape[1:-1]) for shape in whole.shapes], dtype=np.int64)
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
    """Returns the parameters with any rows in a share."""
    return tuple(
        (name, (int(last - first), *shape[1:]))
        for name, shape, first, last in zip(whole.names, whole.shapes, start, stop, strict=True)
        if last > first
    )
