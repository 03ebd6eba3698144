"""What a family's table is made of, canonical tensors, and their element types."""

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

# What a family's table is made of: which parameters a layer has, what each side calls them and how it splits them.

Split = Literal["replicated", "rows", "columns", "vocab", "qkv"]
"""How tensor parallelism cuts a parameter: not at all; rows of each part alike; columns, which are the layer's input;
rows of the padded vocabulary; rows by attention head. Experts are cut by their own tensor parallelism."""

Rows = tuple[int, int]
"""The first of consecutive ones, and how many."""
REPEATED = re.compile(r"(?P<times>\w+)\*\((?P<names>.+)\)")

CHECKPOINT_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint: its name and its dimensions, by their names in `sizes`.

    A first dimension "a+b" tells that rows of `a` lie above rows of `b`, which are split as tensors of their own would
    be; "n*(a+b)" that rows of `a` lie above rows of `b` n times, one below the other, of which all those of `a` are
    such a tensor, and all those of `b`.
    """

    name: str
    dimensions: tuple[str, ...]

    def sections(self, sizes: Mapping[str, int]) -> tuple[tuple[Rows, ...], ...]:
        """Of its first dimension: where the rows of each section lie."""
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
    """One parameter: its parts in the checkpoint, its name in Megatron and in the engine, and its split.

    Names hold "{layer}" where they repeat per layer and "{expert}" where they repeat per expert; a side whose name of
    an expert's parameter lacks it stacks its experts in one parameter. Adjacent rows of one name are one parameter on
    that side, one below the other. `megatron_te` and `split_local` are set where Transformer Engine has another name
    and where Megatron's own layers split otherwise. `float32` parameters keep that type whatever the model's is;
    `quantizable` ones, the matrices of attention, MLPs and experts, may be held in FP8, and they and `adaptable` ones
    may have low-rank adapters. A row without parts is of nothing.
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


@dataclass(frozen=True)
class Layer:
    """A kind of layer: the parameters that it has once, and those that it has once per expert. Where experts are
    `stacked` the checkpoint has one tensor [experts, ...] where a row of `experts` names one of an expert."""

    rows: tuple[Row, ...]
    experts: tuple[Row, ...] = ()
    stacked: bool = False

    def with_rows(self, rows: tuple[Row, ...]) -> "Layer":
        """The same with more of those that it has once."""
        return replace(self, rows=(*self.rows, *rows))

    def expert_copies(self, num_experts: int) -> int:
        """How many times the checkpoint has the tensors of `experts`."""
        return 1 if self.stacked else num_experts


class LayerKind(NamedTuple):
    """Which of a table's layers one is: with experts (`sparse`), a gated delta net (`delta`)."""

    sparse: bool = False
    delta: bool = False


@dataclass(frozen=True)
class Table:
    """A family's parameters. `head` is the vocabulary's, and a parameter of its own only where embeddings are not tied.

    `dense` layers have one MLP; `sparse` ones, of mixture-of-experts families, a router and experts. Of families with
    gated delta nets `delta` and `sparse_delta` are as much with one of those in attention's place.
    """

    embedding: Row
    dense: Layer
    final_norm: tuple[Row, ...]
    head: Row
    sparse: Layer | None = None
    delta: Layer | None = None
    sparse_delta: Layer | None = None

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
    """A row of a layer. Names lack the layer's prefix; `parts` are (name, dimension, ...); where `engine` is left out,
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


# The tensors of a Hugging Face checkpoint, seen as two-dimensional: [n] is [1, n], and
# [n, m, k] is [n * m, k].

Array = NDArray[np.void]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class CanonicalTensors:
    """Names and shapes of a checkpoint's tensors; a tensor's number is its place here."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def matrix_shapes(self) -> IntArray:
        """[tensors, 2]: the shapes with vectors as one row."""
        return np.array([(prod(shape[:-1]), shape[-1]) for shape in self.shapes], dtype=np.int64)


# Element types of tensors, by the numbers that the native kernels use (csrc/reshard.h).

TypeArray = NDArray[np.uint8]


class ElementType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT8_E4M3 = 3
    """Quantised in 128 x 128 blocks of the checkpoint's tensor, each with an fp32 scale in a tensor of its own."""


ITEM_BYTES = np.array([4, 2, 2, 1], dtype=np.int64)
"""Bytes per element, by ElementType."""


def item_bytes(dtype: str) -> int:
    """Of an element of `dtype`, as torch spells it."""
    return int(ITEM_BYTES[ElementType[dtype.upper()]])


def uniform(num_tensors: int, dtype: str) -> TypeArray:
    """The type `dtype`, as torch spells it ("float32", "bfloat16", "float16"), for every one of `num_tensors`."""
    return np.full(num_tensors, ElementType[dtype.upper()], dtype=np.uint8)


def wire_types(source: TypeArray, destination: TypeArray) -> TypeArray:
    """The narrower of two types, element by element: what narrows is cast before the wire, what widens after it."""
    narrower: TypeArray = np.where(ITEM_BYTES[destination] <= ITEM_BYTES[source], destination, source)
    return narrower


# Which of a checkpoint's tensors are matrices within layers: those that Muon makes orthogonal updates of.

_OF_LAYERS = re.compile(r"\.(mtp_)?layers\.\d+\.|^mtp\.fc\.")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")
_BIASES = "_bias"
"""Ends the names of those of all experts of a layer together."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Queries, keys, values, gates and every expert are matrices of their own in a checkpoint. Embeddings, head,
    routers and vectors are none."""
    is_matrix = len(shape) == 2 and min(shape) > 1
    is_other = _ROUTER.search(name) or name.endswith(_BIASES)
    return is_matrix and bool(_OF_LAYERS.search(name)) and not is_other


# What a checkpoint's files call its tensors, where that is not told by its config.json.

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""At the beginning of a safetensors file: how long the JSON object is that follows."""
MOST_HEADER_BYTES = 100_000_000
"""The safetensors library reads no longer header either."""


def stored_names(folder: Path) -> Collection[str]:
    """Of the tensors in a folder of Hugging Face's format; none where it has no files of them, or damaged ones, which
    whoever reads them tells of."""
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


def read_weight_map(folder: Path, config_key: str) -> dict[str, str]:
    """Returns the file of each tensor by the index in `folder`. Links are followed, as copies of the hub consist of
    them. CheckpointError where the index is none, or names a file outside the folder."""
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
    """Whether it is the name of a file in a folder or below it."""
    if not isinstance(file, str) or not file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and path != PurePosixPath() and ".." not in path.parts


# Names of what a model has come to on its way from tokens to logits, by which two of them can be compared.

EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS = "embedding", "final norm", "logits", "log-probs"


def stages_of_layer(index: int) -> tuple[str, str]:
    """The residual stream behind its attention, and behind its MLP or experts."""
    return f"layer {index} attention", f"layer {index} mlp"
