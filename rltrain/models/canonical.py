"""The numbered tensors of a model's checkpoint, with shapes and types."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rltrain.models.architecture import Architecture, Unlisted
from rltrain.models.families import (
    MLP_BIASES,
    MOONLIGHT,
    OUTPUT_BIAS,
    PROJECTION_NORMS,
    QK_NORMS,
    QKV_BIAS,
    VALUE_HEAD,
    stacking_experts,
)
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, adapters_of
from rltrain.models.registry import FAMILIES, PREDICTIONS
from rltrain.models.table import (
    DECODER_PREFIX,
    NESTED_PREFIX,
    NESTED_TOWER_PREFIX,
    CanonicalTensors,
    ElementType,
    IntArray,
    Layer,
    LayerKind,
    Row,
    Table,
    TypeArray,
    uniform,
)
from rltrain.models.vision_tables import VISION, VisionRows, vision_rows, vision_sizes

NUM_LABELS = 1
"""Number of scores of a value head, called labels in transformers' models for sequence classification."""


@lru_cache(maxsize=8)
def table_of(architecture: Architecture) -> Table:
    """Returns the table of the family or its variant, with the head, biases and norms of `architecture`."""
    table = FAMILIES[architecture.family].table
    if architecture.mla and architecture.mla.q_rank is None:
        table = MOONLIGHT
    if architecture.stacked_experts and architecture.adapters is None:  # each expert has adapters of its own
        table = stacking_experts(table)
    own = (
        *((QKV_BIAS,) if architecture.qkv_bias else ()),
        *((OUTPUT_BIAS,) if architecture.output_bias else ()),
        *(MLP_BIASES if architecture.mlp_bias else ()),
        *(_head_norms(architecture) if architecture.qk_norm else ()),
    )
    table = replace(table, dense=table.dense.with_rows(own), sparse=table.sparse and table.sparse.with_rows(own))
    learns_head = architecture.head == "value"
    table = replace(table, head=VALUE_HEAD) if learns_head else table
    table = table if architecture.vision else replace(table, vision=None)
    if adapters := architecture.adapters:
        table = table if adapters.vision else replace(table, vision=None)
        return adapters_of(table, adapters.targets, learns_head=learns_head)
    return table


def adaptable_table(architecture: Architecture) -> Table:
    """Returns the table of the matrices with possible adapters. Experts are separate in it, because each has its own
    adapters."""
    return table_of(replace(architecture, stacked_experts=False))


def _head_norms(architecture: Architecture) -> tuple[Row, Row]:
    return PROJECTION_NORMS if architecture.norms_projections else QK_NORMS


def layer_of(architecture: Architecture, kind: LayerKind) -> Layer:
    """Returns the parameters of a layer of this kind."""
    return table_of(architecture).layer(kind)


def prediction_layer(architecture: Architecture) -> Layer:
    """Returns the parameters of the multi-token prediction layer, the last tensors of the model. Empty if the model has
    none."""
    if not architecture.predicts:
        return Layer(())
    return PREDICTIONS[architecture.family].layer(
        layer_of(architecture, architecture.predicting_kind), architecture.num_layers
    )


def sizes(architecture: Architecture) -> dict[str, int]:
    """Returns the number of elements of each named dimension of `Part`."""
    measured = {
        "vocab": architecture.vocab_size,
        "hidden": architecture.hidden_size,
        "two_hidden": 2 * architecture.hidden_size,
        "queries": architecture.query_size,
        "keys": architecture.kv_size,
        "head": architecture.head_dim,
        "heads": architecture.num_heads,
        "ffn": architecture.ffn_hidden_size,
        "labels": NUM_LABELS,
        "one": 1,
    }
    if adapters := architecture.adapters:
        measured["rank"] = adapters.rank
    if moe := architecture.moe:
        measured |= {
            "experts": moe.num_experts,
            "expert_ffn": moe.ffn_hidden_size,
            "expert_gate_up": 2 * moe.ffn_hidden_size,
            "shared_ffn": moe.shared_ffn_hidden_size,
        }
    if delta := architecture.delta:
        measured |= delta.sizes()
    if vision := architecture.vision:
        measured |= vision_sizes(vision)
    if mla := architecture.mla:
        measured |= {
            "q_rank": mla.q_rank or 0,
            "kv_rank": mla.kv_rank,
            "kv_rank_and_rope": mla.kv_rank + mla.rope_head_dim,
            "keys_and_values": architecture.num_heads * (mla.plain_head_dim + mla.value_head_dim),
            "values": architecture.num_heads * mla.value_head_dim,
        }
    return measured


@lru_cache(maxsize=8)
def canonical_tensors(architecture: Architecture) -> CanonicalTensors:
    """Returns the checkpoint's tensors in their fixed order: embedding, layers, final norm, head unless it is tied,
    multi-token prediction, and the vision tower.

    In a layer, shared tensors come before those of the experts. The latter are ordered by expert.
    """
    if architecture.unlisted:
        return _unlisted_tensors(architecture, architecture.unlisted)
    size = sizes(architecture)
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []

    in_files = _in_files(architecture)
    of_modules = _of_modules(architecture)

    def prefixed(name: str) -> str:
        if name.startswith(PEFT_PREFIX):
            return PEFT_PREFIX + _replaced(name.removeprefix(PEFT_PREFIX), of_modules)
        return _replaced(name, in_files)

    turns = FAMILIES[architecture.family].turns_experts
    turnable: list[int] = []
    for rows, layer, copies, before in _in_order(architecture):
        parts = [part for row in rows for part in row.parts]
        names.extend(prefixed(part.name.format(layer=layer, expert=i)) for i in range(copies) for part in parts)
        shapes.extend([(*before, *part.shape(size)) for part in parts] * copies)
        turnable.extend(range(len(names) - len(parts), len(names)) if turns and before else ())
    return CanonicalTensors(tuple(names), tuple(shapes), frozenset(turnable))


Prefixes = tuple[tuple[str, str], ...]
"""Pairs of a prefix and its replacement."""


def _replaced(name: str, prefixes: Prefixes) -> str:
    for prefix, replacement in prefixes:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _in_files(architecture: Architecture) -> Prefixes:
    """Returns the prefixes in files for those of the table."""
    tower = ((VISION, architecture.vision.prefix),) if architecture.vision else ()
    return (DECODER_PREFIX, architecture.decoder_prefix), *tower


def _of_modules(architecture: Architecture) -> Prefixes:
    """Returns the prefixes of transformers' modules for those of the table. PEFT has them in its files."""
    nested = ((DECODER_PREFIX, NESTED_PREFIX), (VISION, NESTED_TOWER_PREFIX))
    return nested if architecture.vision else ()


STACKED_MATRIX = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
OF_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+\.(gate_proj|up_proj|down_proj)\.weight$")


def adapter_of(matrix: str, architecture: Architecture) -> str:
    """Returns the beginning of the names of a matrix's adapters. `matrix` is its canonical name."""
    of_table = _replaced(matrix, tuple((after, before) for before, after in reversed(_in_files(architecture))))
    return PEFT_PREFIX + _replaced(of_table, _of_modules(architecture)).removesuffix(WEIGHT)


def matrices_of(tensor: str, shape: Sequence[int], row: int, rows: int) -> list[tuple[str, int, int]]:
    """Returns the matrices in `rows` rows of a canonical tensor from `row` on: (name, first row, rows) of each.

    Only tensors with all experts of a layer have several. The tensor is seen as one matrix.
    """
    block, found, stacked = tensor.rpartition(".mlp.experts.")
    if stacked not in STACKED_MATRIX.values():
        return [(tensor, row, rows)]
    names = [name for name, of in STACKED_MATRIX.items() if of == stacked]
    height, end, matrices = shape[1] // len(names), row + rows, []
    while row < end:
        number, first = divmod(row, height)
        expert, half = divmod(number, len(names))
        count = min(height - first, end - row)
        matrices.append((f"{block}{found}{expert}.{names[half]}{WEIGHT}", first, count))
        row += count
    return matrices


def adapted_tensors(architecture: Architecture) -> frozenset[str]:
    """Returns the canonical names of the model's tensors with adapters. `architecture` has these adapters."""
    whole = replace(architecture, adapters=None)
    own = {name.removesuffix(A) for name in canonical_tensors(architecture).names if name.endswith(A)}
    apart = canonical_tensors(replace(whole, stacked_experts=False)).names
    adapted = {name for name in apart if adapter_of(name, architecture) in own}
    if not whole.stacked_experts:
        return frozenset(adapted)
    return frozenset(OF_EXPERT.sub(lambda found: STACKED_MATRIX[found[1]], name) for name in adapted)


def _in_order(architecture: Architecture) -> Iterator[tuple[tuple[Row, ...], int, int, tuple[int, ...]]]:
    """Yields (rows, number of the layer, number of copies, leading dimensions of their tensors)."""
    table = table_of(architecture)

    def of_layer(layer: Layer, number: int) -> Iterator[tuple[tuple[Row, ...], int, int, tuple[int, ...]]]:
        copies = layer.expert_copies(architecture.num_experts)
        yield layer.rows, number, 1, ()
        yield layer.experts, number, copies, (architecture.num_experts,) if layer.stacked else ()

    yield (table.embedding,), 0, 1, ()
    for number, kind in enumerate(architecture.layer_kinds):
        yield from of_layer(layer_of(architecture, kind), number)
    yield table.final_norm if architecture.tied_embeddings else (*table.final_norm, table.head), 0, 1, ()
    yield from of_layer(prediction_layer(architecture), 0)
    for rows, block in tower_rows(architecture):
        yield rows, block, 1, ()


def tower_rows(architecture: Architecture) -> tuple[VisionRows, ...]:
    """Returns the rows of the vision tower, in order. Empty if the model has none."""
    table = table_of(architecture).vision
    return tuple(vision_rows(table, architecture.vision)) if table and architecture.vision else ()


def tower_names(architecture: Architecture) -> frozenset[str]:
    """Returns the canonical names of the vision tower's tensors."""
    count = sum(tensors_in(rows) for rows, _ in tower_rows(architecture))
    names = canonical_tensors(architecture).names
    return frozenset(names[len(names) - count :])


def _unlisted_tensors(architecture: Architecture, unlisted: Unlisted) -> CanonicalTensors:
    tensors = unlisted.tensors
    if architecture.head == "vocabulary":
        return tensors
    shapes = dict(zip(tensors.names, tensors.shapes, strict=True))
    decoder = [name for name in tensors.names if name.startswith(f"{unlisted.prefix}.")]
    head = (NUM_LABELS, architecture.hidden_size)
    return CanonicalTensors((*decoder, VALUE_HEAD.parts[0].name), (*(shapes[name] for name in decoder), head))


@lru_cache(maxsize=8)
def first_tensors(architecture: Architecture) -> IntArray:
    """Returns the number of every layer's first tensor, and of the first tensor after the layers: [layers + 1]."""
    counts = [
        tensors_in(layer.rows) + tensors_in(layer.experts) * layer.expert_copies(architecture.num_experts)
        for layer in (layer_of(architecture, kind) for kind in architecture.layer_kinds)
    ]
    return np.cumsum([tensors_in((table_of(architecture).embedding,)), *counts])


def tensors_in(rows: tuple[Row, ...]) -> int:
    return sum(len(row.parts) for row in rows)


def element_types(architecture: Architecture, dtype: str) -> TypeArray:
    """Returns the element type of each tensor in a model of `dtype`, [tensors]. Some tensors stay fp32."""
    types = uniform(len(canonical_tensors(architecture).names), dtype)
    types[_marked(architecture, lambda row: row.float32)] = ElementType.FLOAT32
    return types


@lru_cache(maxsize=8)
def quantizable_tensors(architecture: Architecture) -> NDArray[np.bool_]:
    """Returns True for each tensor that can be held in FP8, [tensors]: matrices of attention, MLPs and experts.
    Read-only."""
    marked = _marked(architecture, lambda row: row.quantizable)
    marked.setflags(write=False)
    return marked


def _marked(architecture: Architecture, mark: Callable[[Row], bool]) -> NDArray[np.bool_]:
    """Returns whether the row of each tensor has a mark, [tensors]."""
    if architecture.unlisted:
        return np.zeros(len(canonical_tensors(architecture).names), dtype=bool)
    marks = [mark(row) for rows, _, copies, _ in _in_order(architecture) for row in rows * copies for _ in row.parts]
    return np.array(marks, dtype=bool)
