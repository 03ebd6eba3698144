"""The parts of a family's table, canonical tensors, and element types."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrain.errors import CheckpointError, named_by
from rltrain.runtime.json_text import parse_json, read_json

# The parts of a family's table: the parameters of a layer, their names on each side, and their splits.

Split = Literal["replicated", "rows", "columns", "vocab", "qkv"]
"""The tensor-parallel split of a parameter. Experts have a separate tensor parallelism.

- "replicated": not split
- "rows": the rows of each part
- "columns": the input columns
- "vocab": the rows of the padded vocabulary
- "qkv": rows by attention head
"""

Rows = tuple[int, int]
"""(first row, number of rows) of consecutive rows."""
REPEATED = re.compile(r"(?P<times>\w+)\*\((?P<names>.+)\)")

CHECKPOINT_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint: its name, and the names of its dimensions in `sizes`.

    A first dimension "a+b" means that rows of `a` come before rows of `b`. Each section is split like a separate
    tensor. "n*(a+b)" repeats this n times. All rows of `a` then form one section, and all rows of `b` another.
    """

    name: str
    dimensions: tuple[str, ...]

    def sections(self, sizes: Mapping[str, int]) -> tuple[tuple[Rows, ...], ...]:
        """Returns the row ranges of each section of the first dimension."""
        repeated = REPEATED.fullmatch(self.dimensions[0])
        times = sizes[repeated["times"]] if repeated else 1
        counts = [sizes[name] for name in (repeated["names"] if repeated else self.dimensions[0]).split("+")]
        firsts, whole = [sum(counts[:number]) for number in range(len(counts))], sum(counts)
        return tuple(
            tuple((copy * whole + first, count) for copy in range(times))
            for first, count in zip(firsts, counts, strict=True)
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        num_rows = sum(count for section in self.sections(sizes) for _, count in section)
        return num_rows, *(sizes[dimension] for dimension in self.dimensions[1:])


@dataclass(frozen=True)
class Row:
    """One parameter: its parts in the checkpoint, its names in Megatron and in the engine, and its split.

    Names contain "{layer}" for a parameter of each layer, and "{expert}" for one of each expert. If the name of an
    expert's parameter lacks "{expert}", that side stacks all experts in one parameter. Adjacent rows of equal name are
    one parameter on that side, in this order.

    `megatron_te` is the name in Transformer Engine, if it differs. `sglang` is the name in SGLang, if it differs from
    that in the embedded engine. `split_local` is the split of Megatron's own layers, if it differs.

    `float32` parameters are fp32 in models of any dtype. `quantizable` ones (matrices of attention, MLPs and experts)
    can be held in FP8. They and `adaptable` ones can have low-rank adapters. A row without parts has no parameter.
    """

    parts: tuple[Part, ...]
    megatron: str
    engine: str
    split: Split = "replicated"
    megatron_te: str | None = None
    split_local: Split | None = None
    float32: bool = False
    quantizable: bool = False
    adaptable: bool = False
    sglang: str | None = None


@dataclass(frozen=True)
class Layer:
    """A kind of layer: the parameters of the layer, and those of each expert. If `stacked`, the checkpoint has one
    tensor [experts, ...] for each row of `experts`."""

    rows: tuple[Row, ...]
    experts: tuple[Row, ...] = ()
    stacked: bool = False

    def with_rows(self, rows: tuple[Row, ...]) -> "Layer":
        """Returns the layer with additional `rows`."""
        return replace(self, rows=(*self.rows, *rows))

    def expert_copies(self, num_experts: int) -> int:
        """Returns the number of copies of the `experts` tensors in the checkpoint."""
        return 1 if self.stacked else num_experts


class LayerKind(NamedTuple):
    """The kind of a layer: with experts (`sparse`), with a gated delta net (`delta`), or both."""

    sparse: bool = False
    delta: bool = False


@dataclass(frozen=True)
class VisionTable:
    """The parameters of a vision tower, in this order: `first`, every block, `last`, and every merger of features for
    the first layers of the language model (`deepstack`)."""

    first: tuple[Row, ...]
    block: tuple[Row, ...]
    last: tuple[Row, ...]
    deepstack: tuple[Row, ...]

    @property
    def parts(self) -> tuple[tuple[Row, ...], ...]:
        """The rows of each part."""
        return self.first, self.block, self.last, self.deepstack

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows. Those of a block and of a merger occur once."""
        return tuple(row for part in self.parts for row in part)


@dataclass(frozen=True)
class Table:
    """A family's parameters. The `head` is that of the vocabulary. It is only a parameter if embeddings are not tied.

    `dense` layers have one MLP. `sparse` layers of mixture-of-experts families have a router and experts. `delta` and
    `sparse_delta` are the same layers with a gated delta net instead of attention. `vision` is the vision tower, a part
    of models with Architecture.vision.
    """

    embedding: Row
    dense: Layer
    final_norm: tuple[Row, ...]
    head: Row
    sparse: Layer | None = None
    delta: Layer | None = None
    sparse_delta: Layer | None = None
    vision: VisionTable | None = None

    def layer(self, kind: LayerKind) -> Layer:
        found = (self.sparse_delta if kind.sparse else self.delta) if kind.delta else self.dense
        found = self.sparse if kind == LayerKind(sparse=True) else found
        assert found is not None, f"the family has no layers of {kind}"
        return found


def in_layer(
    *parts: tuple[str, ...],
    megatron: str,
    engine: str | None = None,
    split: Split = "replicated",
    megatron_te: str | None = None,
    split_local: Split | None = None,
    float32: bool = False,
    quantizable: bool = False,
    adaptable: bool = False,
) -> Row:
    """Returns a row of a layer. Names lack the layer's prefix. `parts` are (name, dimension, ...). Without `engine`,
    the engine has the checkpoint's name."""
    return Row(
        parts=tuple(Part(CHECKPOINT_LAYER + name, tuple(dimensions)) for name, *dimensions in parts),
        megatron=MEGATRON_LAYER + megatron,
        engine=CHECKPOINT_LAYER + (engine or parts[0][0]),
        split=split,
        megatron_te=megatron_te and MEGATRON_LAYER + megatron_te,
        split_local=split_local,
        float32=float32,
        quantizable=quantizable,
        adaptable=adaptable or quantizable,
    )


# The tensors of a Hugging Face checkpoint, viewed as matrices. [n] is [1, n], and [n, m, k] is [n * m, k].

Array = NDArray[np.void]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class CanonicalTensors:
    """The names and shapes of a checkpoint's tensors. The number of a tensor is its index.

    Some files have the matrices of the stacked tensors `turnable` transposed, with shape [experts, columns, rows].
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    turnable: frozenset[int] = frozenset()

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def matrix_shapes(self) -> IntArray:
        """Shapes as matrices, [tensors, 2]. A vector is one row."""
        return np.array([(prod(shape[:-1]), shape[-1]) for shape in self.shapes], dtype=np.int64)


# Element types of tensors, with the numbers of the native kernels (csrc/reshard.h).

TypeArray = NDArray[np.uint8]


class ElementType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT8_E4M3 = 3
    """Quantised in 128 x 128 blocks of the checkpoint's tensor. Another tensor has the fp32 scale of each block."""


ITEM_BYTES = np.array([4, 2, 2, 1], dtype=np.int64)
"""Bytes per element, by ElementType."""


def item_bytes(dtype: str) -> int:
    """Returns the bytes per element of `dtype`, in torch's spelling."""
    return int(ITEM_BYTES[ElementType[dtype.upper()]])


def uniform(num_tensors: int, dtype: str) -> TypeArray:
    """Returns an array with the type `dtype` for each of `num_tensors` tensors, in torch's spelling ("float32",
    "bfloat16", "float16")."""
    return np.full(num_tensors, ElementType[dtype.upper()], dtype=np.uint8)


def wire_types(source: TypeArray, destination: TypeArray) -> TypeArray:
    """Returns the narrower of two types per tensor. A narrowing cast happens before the transfer, a widening one after
    it."""
    narrower: TypeArray = np.where(ITEM_BYTES[destination] <= ITEM_BYTES[source], destination, source)
    return narrower


# Matrices within layers. Muon makes their updates orthogonal.

_OF_LAYERS = re.compile(r"\.(mtp_)?layers\.\d+\.|^mtp\.fc\.")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")
_BIASES = "_bias"
"""The end of names of tensors with the biases of all experts of a layer."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Returns whether the tensor is a matrix within a layer. In a checkpoint, queries, keys, values, gates and every
    expert are separate matrices. Embeddings, head, routers and vectors do not count."""
    is_matrix = len(shape) == 2 and min(shape) > 1
    is_other = _ROUTER.search(name) or name.endswith(_BIASES)
    return is_matrix and bool(_OF_LAYERS.search(name)) and not is_other


# Tensor names of files, for facts missing in config.json.

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""Bytes at the beginning of a safetensors file with the length of the JSON header."""
MOST_HEADER_BYTES = 100_000_000
"""The largest header of the safetensors library."""


def stored_names(folder: Path) -> Collection[str]:
    """Returns the names of the tensors in a folder of Hugging Face's format. Returns none if there are no files or they
    are damaged. Loading them raises the error."""
    try:
        if (folder / SINGLE_FILE).exists():
            with (folder / SINGLE_FILE).open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                if length > MOST_HEADER_BYTES:
                    return ()
                return parse_json(file.read(length)).keys() - {"__metadata__"}
        return read_weight_map(folder, "model.path").keys() if (folder / INDEX_FILE).exists() else ()
    except (OSError, ValueError, TypeError, AttributeError, CheckpointError):
        return ()


DECODER_PREFIX = "model."
"""The prefix of a decoder's tensors in files of a language model alone."""
NESTED_PREFIX = "model.language_model."
"""The prefix of a decoder's tensors in files with a vision tower."""
TOWER_PREFIX = "visual."
NESTED_TOWER_PREFIX = "model.visual."
"""The prefixes of a vision tower's tensors, beside a decoder or within the model."""
STACKED_EXPERTS = ".mlp.experts.gate_up_proj"
"""The end of names of tensors with all experts of a layer. Other files of the same families have one tensor per
expert."""


class NamesInFiles(NamedTuple):
    """The prefixes of the tensors of decoder and vision tower, and whether one tensor has all experts of a layer."""

    decoder: str = DECODER_PREFIX
    tower: str = NESTED_TOWER_PREFIX
    stacked: bool = False


def names_in_files(stored: Collection[str], published: NamesInFiles) -> NamesInFiles:
    """Returns the names according to the tensors `stored` in a folder. Without tensors they are as `published`."""
    if not stored:
        return published
    return NamesInFiles(
        NESTED_PREFIX if any(name.startswith(NESTED_PREFIX) for name in stored) else DECODER_PREFIX,
        TOWER_PREFIX if any(name.startswith(TOWER_PREFIX) for name in stored) else NESTED_TOWER_PREFIX,
        any(name.endswith(STACKED_EXPERTS) for name in stored),
    )


def read_weight_map(folder: Path, config_key: str) -> dict[str, str]:
    """Returns the file of each tensor from the index in `folder`. Links are followed, because the hub's cache consists
    of them. Raises CheckpointError if the index is invalid or names a file outside the folder."""
    index = folder / INDEX_FILE
    try:
        files = read_json(index)["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{index} is not a safetensors index: {problem!r} ({named_by(config_key)})") from None
    for name, file in files:
        if not _is_inside(file):
            raise CheckpointError(
                f"{index}: weight_map has {file!r:.200} for {name!r:.200}; expected the name of a file in that folder "
                f"({named_by(config_key)})"
            )
    return dict(files)


def _is_inside(file: object) -> bool:
    """Returns whether `file` is the name of a file in a folder or below it."""
    if not isinstance(file, str) or not file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and path != PurePosixPath() and ".." not in path.parts


# Names of intermediate results from tokens to logits, for comparing two models.

EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS = "embedding", "final norm", "logits", "log-probs"


def stages_of_layer(index: int) -> tuple[str, str]:
    """Returns the names of the residual stream after attention and after the MLP or experts of a layer."""
    return f"layer {index} attention", f"layer {index} mlp"
