"""Layouts against whole tensors cut by formula."""

import numpy as np
import pytest

from rltrain.cluster.grid import Grid
from rltrain.reshard.layout import Layout
from rltrain.rollout.layout import engine_layout
from rltrain.training.layout import megatron_layout
from tests.model_shards import PADDING, Place, Tensors, engine_shard, full_tensors, megatron_shard, tiny_architecture


def filled(layout: Layout, rank: int, full: Tensors) -> Tensors:
    """The rank's parameters with every piece copied from the whole tensors, each element written at most once."""
    on = layout.on(rank)
    flats = [np.full(int(np.prod(shape)), PADDING, dtype=np.float32) for _, shape in on.parameters]
    written = [np.zeros(len(flat), dtype=np.int64) for flat in flats]
    for piece in on.pieces:
        name = layout.tensors.names[piece["tensor"]]
        matrix = full[name].reshape(-1, full[name].shape[-1])
        rows, cols = int(piece["rows"]), int(piece["cols"])
        box = matrix[piece["row"] : piece["row"] + rows, piece["col"] : piece["col"] + cols]
        assert box.shape == (rows, cols), f"{name}: {piece} leaves the tensor"
        where = piece["offset"] + np.arange(rows)[:, None] * piece["stride"] + np.arange(cols)
        flats[piece["parameter"]][where] = box
        written[piece["parameter"]][where] += 1
    assert all(counts.max() <= 1 for counts in written)
    return {name: flat.reshape(shape) for (name, shape), flat in zip(on.parameters, flats, strict=True)}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        assert np.array_equal(found[name], expected[name]), name


FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_megatron_layout(family: str, tied: bool, tp: int, pp: int, dp: int) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=4)
    full = full_tensors(architecture)
    grid = Grid(tuple(range(3, 3 + tp * pp * dp)), tp=tp, pp=pp)
    layout = megatron_layout(architecture, grid)
    assert list(layout.tensors.names) == sorted(full, key=layout.tensors.names.index)
    for rank in grid.ranks:
        at = grid.coordinates(rank)
        expected = megatron_shard(architecture, full, Place(tp, at.tp, pp, at.pp))
        assert_equal(filled(layout, rank, full), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (4, 1), (4, 2)])
def test_engine_layout(family: str, tied: bool, tp: int, dp: int) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied)
    full = full_tensors(architecture)
    grid = Grid(tuple(range(tp * dp)), tp=tp)
    layout = engine_layout(architecture, grid)
    for rank in grid.ranks:
        expected = engine_shard(architecture, full, Place(tp, grid.coordinates(rank).tp))
        assert_equal(filled(layout, rank, full), expected)


def test_kv_heads_that_tensor_parallelism_exceeds() -> None:
    architecture = tiny_architecture(num_heads=8, num_kv_heads=2, head_dim=4)
    full = full_tensors(architecture)
    grid = Grid(tuple(range(8)), tp=8)
    megatron, engine = megatron_layout(architecture, grid), engine_layout(architecture, grid)
    for rank in range(8):
        assert_equal(filled(megatron, rank, full), megatron_shard(architecture, full, Place(8, rank)))
        assert_equal(filled(engine, rank, full), engine_shard(architecture, full, Place(8, rank)))


def test_transformer_engine_renames_the_fused_norms_only() -> None:
    architecture = tiny_architecture()
    grid = Grid((0,))
    local = megatron_layout(architecture, grid).on(0)
    fused = megatron_layout(architecture, grid, transformer_engine=True).on(0)
    renamed = {old: new for (old, _), (new, _) in zip(local.parameters, fused.parameters, strict=True) if old != new}
    assert renamed == {
        f"decoder.layers.{i}.{old}": f"decoder.layers.{i}.{new}"
        for i in range(2)
        for old, new in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        )
    }
    assert np.array_equal(local.pieces, fused.pieces)


def test_replicas_share_one_part() -> None:
    architecture = tiny_architecture()
    layout = megatron_layout(architecture, Grid((2, 5, 7, 11), tp=2))
    assert layout.on(2) is layout.on(7)
    assert layout.on(5) is layout.on(11)
    assert layout.on(2) is not layout.on(5)


def test_an_uneven_split_is_refused() -> None:
    architecture = tiny_architecture(num_layers=3)
    with pytest.raises(ValueError, match="layers"):
        megatron_layout(architecture, Grid((0, 1), pp=2)).on(0)
    with pytest.raises(ValueError, match="tensor parallelism alone"):
        engine_layout(architecture, Grid((0, 1), pp=2))
