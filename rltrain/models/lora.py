"""Tables of low-rank adapters, Hu et al. 2021, "LoRA", with the names of PEFT's files: A [rank, inputs] and B [outputs,
rank] of each adapted matrix.

Where training or an engine keeps several matrices in one parameter, their A lie one below the other in one parameter,
and so do their B, cut as the matrices are. If one of them is adapted the others have adapters too, which stay zero:
zeros have zero gradients.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from rltrain.models.table import Layer, Part, Row, Split, Table

PEFT_PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
ADAPTER_A, ADAPTER_B = ".lora.a", ".lora.b"
"""What ends the names of training's parameters, after the name of the layer that they are added to, and of an engine's,
after the name of the parameter that they are added to."""
WEIGHT = ".weight"
NOTHING = Row(parts=(), megatron="", engine="")


def adapters_of(table: Table, targets: Collection[str] | None, *, learns_head: bool = False) -> Table:
    """The adapters of a family's matrices called `targets`, or of all; nothing else but, where it learns too, the
    head."""
    sparse, delta, sparse_delta = (
        _of_layer(layer, targets) if layer else None for layer in (table.sparse, table.delta, table.sparse_delta)
    )
    return Table(
        embedding=NOTHING,
        dense=_of_layer(table.dense, targets),
        final_norm=(),
        head=table.head if learns_head else NOTHING,
        sparse=sparse,
        delta=delta,
        sparse_delta=sparse_delta,
    )


def target_of(tensor: str) -> str:
    """What PEFT calls the matrix in its target_modules: the last part of its module's name. `tensor` is a matrix, or an
    adapter of one."""
    for ending in (A, B, WEIGHT):
        if tensor.endswith(ending):
            return tensor.removesuffix(ending).rpartition(".")[2]
    raise ValueError(f"{tensor} is the name of no matrix and of no adapter of one")


def matrix_of(tensor: str) -> str:
    """The name of the matrix that an adapter `tensor` is of."""
    return tensor.removeprefix(PEFT_PREFIX).removesuffix(A).removesuffix(B) + WEIGHT


def targets_in(table: Table) -> tuple[str, ...]:
    """All matrices that may be adapted, in the order of the table."""
    layers = [layer for layer in (table.dense, table.sparse, table.delta, table.sparse_delta) if layer]
    rows = [row for layer in layers for row in (*layer.rows, *layer.experts) if row.adaptable]
    return tuple(dict.fromkeys(target_of(part.name) for row in rows for part in row.parts))


def _of_layer(layer: Layer, targets: Collection[str] | None) -> Layer:
    return replace(layer, rows=_of_rows(layer.rows, targets), experts=_of_rows(layer.experts, targets))


def _of_rows(rows: Collection[Row], targets: Collection[str] | None) -> tuple[Row, ...]:
    adapted: list[Row] = []
    for _, together in groupby((row for row in rows if row.adaptable), key=lambda row: row.engine):
        members = [*together]
        named = {target_of(part.name) for row in members for part in row.parts}
        if targets is None or not named.isdisjoint(targets):
            adapted += [_a_of(row) for row in members] + [_b_of(row) for row in members]
    return tuple(adapted)


def _a_of(row: Row) -> Row:
    """Tensor parallelism that cuts a matrix by columns cuts A; by rows B. The other one every rank has."""
    by_columns = row.split == "columns"
    return _half(row, A, ADAPTER_A, (None, 1), row.split if by_columns else "replicated", None)


def _b_of(row: Row) -> Row:
    by_columns = row.split == "columns"
    return _half(row, B, ADAPTER_B, (0, None), "replicated" if by_columns else row.split, row.split_local)


def _half(
    row: Row,
    ending: str,
    name: str,
    dimensions: tuple[int | None, int | None],
    split: Split,
    split_local: Split | None,
) -> Row:
    parts = tuple(
        Part(
            PEFT_PREFIX + part.name.removesuffix(WEIGHT) + ending,
            tuple("rank" if place is None else part.dimensions[place] for place in dimensions),
        )
        for part in row.parts
    )
    return replace(
        row,
        parts=parts,
        megatron=row.megatron.removesuffix(WEIGHT) + name,
        engine=row.engine + name,
        split=split,
        megatron_te=row.megatron_te and row.megatron_te.replace(WEIGHT, name),
        split_local=split_local,
        quantizable=False,
        adaptable=False,
    )
