"""Tables of low-rank adapters (Hu et al. 2021, "LoRA"), with the names of PEFT's files. Each adapted matrix has A
[rank, inputs] and B [outputs, rank].

If training or an engine fuses several matrices into one parameter, their A are stacked in one parameter and their B in
another. They are split like the matrices. If one of the matrices is adapted, all of them have adapters. The additional
ones stay zero, because zeros have zero gradients.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from rltrain.models.table import NESTED_TOWER_PREFIX, Layer, Part, Row, Split, Table, VisionTable

PEFT_PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
ADAPTER_A, ADAPTER_B = ".lora.a", ".lora.b"
"""The end of adapter names. In training it follows the name of the adapted layer, in an engine the name of the adapted
parameter."""
WEIGHT = ".weight"
NOTHING = Row(parts=(), megatron="", engine="")


def adapters_of(table: Table, targets: Collection[str] | None, *, learns_head: bool = False) -> Table:
    """Returns the adapters of the matrices in `targets` (None: all). With `learns_head` the table also has the head."""
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
        vision=table.vision and VisionTable(*(_of_rows(rows, targets) for rows in table.vision.parts)),
    )


def target_of(tensor: str) -> str:
    """Returns PEFT's name of a matrix in target_modules, the last part of its module's name. `tensor` is a matrix or
    one of its adapters."""
    for ending in (A, B, WEIGHT):
        if tensor.endswith(ending):
            return tensor.removesuffix(ending).rpartition(".")[2]
    raise ValueError(f"{tensor} names neither a matrix nor an adapter")


def is_of_tower(adapter: str) -> bool:
    """Returns whether an adapter or a matrix of transformers' modules belongs to the vision tower."""
    return adapter.removeprefix(PEFT_PREFIX).startswith(NESTED_TOWER_PREFIX)


def module_of(tensor: str) -> str:
    """Returns PEFT's entry of target_modules for an adapter. PEFT compares it with the end of the names of modules.

    In a vision tower the last part alone would also name blocks and a convolution.
    """
    parts = tensor.removesuffix(A).removesuffix(B).split(".")
    return ".".join(parts[-2:]) if is_of_tower(tensor) else parts[-1]


def targets_in(table: Table) -> tuple[str, ...]:
    """Returns the names of all adaptable matrices, in the order of the table."""
    layers = [layer for layer in (table.dense, table.sparse, table.delta, table.sparse_delta) if layer]
    of_tower = table.vision.rows if table.vision else ()
    rows = [row for layer in layers for row in (*layer.rows, *layer.experts)]
    rows = [row for row in (*rows, *of_tower) if row.adaptable]
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
    """Returns the row of A. Tensor parallelism splits A of a matrix split by columns, and B of a matrix split by rows.
    The other one is replicated."""
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
        sglang=row.sglang and row.sglang + name,
        split=split,
        megatron_te=row.megatron_te and row.megatron_te.replace(WEIGHT, name),
        split_local=split_local,
        quantizable=False,
        adaptable=False,
    )
