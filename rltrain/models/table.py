"""What a family's table is made of: which parameters a layer has, what each side calls them and how it splits them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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
