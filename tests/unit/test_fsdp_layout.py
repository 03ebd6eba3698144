"""Shards against torch's own cut of whole parameters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.models import Architecture, canonical_tensors
from rltrain.models.architecture import Unlisted
from rltrain.models.table import CanonicalTensors
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import Tensors, full_tensors, tiny_architecture
from tests.unit.test_layouts import assert_equal, filled


def transformers_parameters(full: Tensors) -> Tensors:
    """What transformers' model has: a layer's experts in two parameters, gate above up."""
    found: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in full.items():
        block, experts, matrix = name.partition(".experts.")
        renamed = block.replace("block_sparse_moe", "mlp")
        if not experts:
            found[renamed] = values
            continue
        if "." not in matrix:  # of all experts already
            found[name] = values
            continue
        kind = matrix.split(".")[1]
        stack = "down_proj" if kind in ("down_proj", "w2") else "gate_up_proj"
        stacks.setdefault(f"{renamed}.experts.{stack}", []).append(values)
    for name, matrices in stacks.items():
        pairs = (
            matrices
            if name.endswith("down_proj")
            else [np.concatenate([gate, up]) for gate, up in zip(matrices[::2], matrices[1::2], strict=True)]
        )
        found[name] = np.stack(pairs)
    return found


def assert_sharded(architecture: Architecture, shards: int, copies: int = 1) -> None:
    grid = Grid(tuple(range(3, 3 + shards * copies)), copies=copies)
    layout, full = fsdp_layout(architecture, grid), full_tensors(architecture)
    for rank in grid.ranks:
        expected = {}
        for name, values in transformers_parameters(full).items():
            cut = torch.from_numpy(values).chunk(shards)
            if (rank - 3) % shards < len(cut):
                expected[name] = cut[(rank - 3) % shards].numpy()
        assert_equal(filled(layout, rank, full), expected)
    assert layout.parts == tuple(range(shards)) * copies


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "qwen3_5_text", "qwen3_next", "gpt_oss"]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_every_rank_holds_what_torch_cuts_for_it(family: str, tied: bool, shards: int) -> None:
    assert_sharded(tiny_architecture(family, tied_embeddings=tied), shards)


@given(st.integers(1, 60), st.integers(1, 3))
def test_shards_may_be_empty_and_copies_are_alike(shards: int, copies: int) -> None:
    assert_sharded(tiny_architecture("qwen3"), shards, copies)


def test_value_models() -> None:
    assert_sharded(tiny_architecture("qwen3").value_model(), 3)


def test_a_family_without_a_table_has_what_transformers_has() -> None:
    tensors = CanonicalTensors(
        ("body.wte.weight", "body.h.0.w", "body.h.0.b", "head.weight"), ((7, 4), (4, 6), (6,), (7, 4))
    )
    architecture = replace(tiny_architecture(hidden_size=4), unlisted=Unlisted(tensors, "body", "C"))
    layout = fsdp_layout(architecture, Grid((0, 1, 2), copies=1), dtype="bfloat16")
    assert [layout.on(rank).parameters for rank in (0, 2)] == [
        (("body.wte.weight", (3, 4)), ("body.h.0.w", (2, 6)), ("body.h.0.b", (2,)), ("head.weight", (3, 4))),
        (("body.wte.weight", (1, 4)), ("body.h.0.b", (2,)), ("head.weight", (1, 4))),
    ]
    assert canonical_tensors(architecture.value_model()).names == (
        "body.wte.weight",
        "body.h.0.w",
        "body.h.0.b",
        "score.weight",
    )


def test_both_backends_have_the_same_tensors() -> None:
    """So that weights and states go from one to the other."""
    architecture = tiny_architecture("qwen3_moe")
    grid = Grid((0, 1))
    assert fsdp_layout(architecture, replace(grid, copies=1)).tensors is megatron_layout(architecture, grid).tensors
