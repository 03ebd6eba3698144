"""Layouts against whole tensors cut by formula."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rltrain.models import Architecture, canonical_tensors
from rltrain.models.table import ElementType
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import (
    MOE,
    PADDING,
    VARIANTS,
    Place,
    Tensors,
    engine_shard,
    full_tensors,
    megatron_shard,
    tiny_architecture,
)
from tests.unit.plan_simulation import engine_places, megatron_places
from tools.benchmarks.model_shapes import deepseek_v3


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


FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "glm4", "gemma3_text", "qwen3_5_text", "nemotron")
SPARSE_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "glm4_moe", "minimax_m2", "qwen3_next", "hy_v3")
SPARSE_FAMILIES += ("gpt_oss",)


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


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE_FAMILIES])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 4}], ids=str)
def test_value_models_of_megatron(family: str, tied: bool, sizes: dict[str, int]) -> None:
    """The score row, whole, is on every rank of the last stage, which holds no copy of the embeddings."""
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=4).value_model()
    assert_megatron(architecture, Grid(tuple(range(2, 6)), **sizes))


def test_kv_heads_that_tensor_parallelism_exceeds() -> None:
    architecture = tiny_architecture(num_heads=8, num_kv_heads=2, head_dim=4)
    full = full_tensors(architecture)
    grid = Grid(tuple(range(8)), tp=8)
    megatron, engine = megatron_layout(architecture, grid), engine_layout(architecture, grid)
    for rank in range(8):
        assert_equal(filled(megatron, rank, full), megatron_shard(architecture, full, Place(8, rank)))
        assert_equal(filled(engine, rank, full), engine_shard(architecture, full, Place(8, rank)))


def assert_megatron(architecture: Architecture, grid: Grid, **settings: Any) -> None:
    """Every rank holds what the oracle says; ranks have one part exactly where they hold equal parameters."""
    full = full_tensors(architecture)
    layout = megatron_layout(architecture, grid, **settings)
    assert set(layout.tensors.names) == set(full)
    shards = []
    for rank, place in megatron_places(grid, **settings).items():
        shards.append(megatron_shard(architecture, full, place))
        assert_equal(filled(layout, rank, full), shards[-1])
    for one, part in zip(shards, layout.parts, strict=True):
        for other, other_part in zip(shards, layout.parts, strict=True):
            same = one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
            assert (part == other_part) == same


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "transformer_engine"),
    [
        ({}, True),
        ({"ep": 4}, False),
        ({"tp": 2}, True),
        ({"tp": 2, "ep": 2}, False),
        ({"tp": 2, "ep": 4, "etp": 1}, True),
        ({"tp": 4, "ep": 2, "etp": 2}, False),
        ({"tp": 1, "ep": 2, "etp": 4}, True),
        ({"tp": 2, "pp": 2, "ep": 2}, True),
        ({"tp": 2, "pp": 2, "ep": 2}, False),
        ({"tp": 2, "pp": 2, "ep": 2, "etp": 1}, False),
        ({"tp": 2, "cp": 2, "ep": 4, "etp": 1}, False),
    ],
    ids=str,
)
def test_experts_of_megatron(family: str, sizes: dict[str, int], transformer_engine: bool) -> None:
    grid = Grid(tuple(range(3, 11)), **sizes)
    assert_megatron(tiny_architecture(family, num_layers=4), grid, transformer_engine=transformer_engine)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "pp": 2, "ep": 2}], ids=str)
def test_variants_of_megatron(variant: str, tied: bool, transformer_engine: bool, sizes: dict[str, int]) -> None:
    architecture = replace(VARIANTS[variant], tied_embeddings=tied)
    assert_megatron(architecture, Grid(tuple(range(8)), **sizes), transformer_engine=transformer_engine)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_variants_of_engines(variant: str, tp: int) -> None:
    architecture = VARIANTS[variant]
    full = full_tensors(architecture)
    grid = Grid(tuple(range(4)), tp=tp)
    layout = engine_layout(architecture, grid)
    for rank, place in engine_places(grid).items():
        assert_equal(filled(layout, rank, full), engine_shard(architecture, full, place))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("pp", "vpp", "layers_per_stage"),
    [
        (2, 2, None),
        (4, 2, None),
        (2, 4, None),
        (2, 1, (5, 3)),
        (4, 1, (3, 3, 2, 0)),
        (2, 2, (1, 4, 2, 1)),
        (2, 3, (0, 1, 1, 3, 2, 1)),
    ],
)
def test_pipelines_of_megatron(
    family: str, tied: bool, pp: int, vpp: int, layers_per_stage: tuple[int, ...] | None
) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=8)
    assert_megatron(architecture, Grid(tuple(range(8)), pp=pp, ep=2, etp=1, vpp=vpp, layers_per_stage=layers_per_stage))


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.parametrize(("tp", "ep", "dp"), [(1, 1, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1), (2, 2, 2)])
def test_experts_of_engines(family: str, tp: int, ep: int, dp: int) -> None:
    architecture = tiny_architecture(family)
    full = full_tensors(architecture)
    grid = Grid(tuple(range(tp * dp)), tp=tp, ep=ep, etp=tp // ep)
    layout = engine_layout(architecture, grid)
    for rank, place in engine_places(grid).items():
        assert_equal(filled(layout, rank, full), engine_shard(architecture, full, place))
        assert layout.on(rank) is layout.on(place.tp_rank)


def test_every_element_of_the_checkpoint_lies_somewhere() -> None:
    """Over all ranks; a part repeated over ranks counts once."""
    for family in (*FAMILIES, *SPARSE_FAMILIES):
        architecture = tiny_architecture(family, num_layers=4)
        grid = Grid(tuple(range(8)), tp=2, pp=2, ep=2)
        for layout in (megatron_layout(architecture, grid), engine_layout(architecture, Grid(grid.ranks, tp=2))):
            held = [np.zeros(shape, dtype=bool) for shape in layout.tensors.matrix_shapes]
            for part in set(layout.parts):
                for piece in layout.part(part).pieces:
                    row, col = int(piece["row"]), int(piece["col"])
                    held[piece["tensor"]][row : row + int(piece["rows"]), col : col + int(piece["cols"])] = True
            assert all(tensor.all() for tensor in held)


def test_the_router_bias_alone_keeps_its_type() -> None:
    architecture = tiny_architecture("deepseek_v3", num_layers=3)
    megatron, engine = (make(architecture, Grid((0,)), dtype="bfloat16") for make in (megatron_layout, engine_layout))
    for layout in (megatron, engine):
        names = np.array(layout.tensors.names)
        assert set(names[layout.types == ElementType.FLOAT32]) == {
            f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)
        }
        assert set(layout.types) == {ElementType.FLOAT32, ElementType.BFLOAT16}
    assert set(megatron_layout(tiny_architecture("mixtral"), Grid((0,)), dtype="float16").types) == {
        ElementType.FLOAT16
    }


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


def test_engines_have_no_stages() -> None:
    architecture = tiny_architecture(num_layers=3)
    with pytest.raises(ValueError, match="tensor parallelism alone"):
        engine_layout(architecture, Grid((0, 1), pp=2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 2, "layers_per_stage": (2, 2)}, r"layers_per_stage is \[2, 2\]; expected 2 numbers .* 3 layers"),
        ({"pp": 2, "layers_per_stage": (1, 1, 1)}, "expected 2 numbers"),
        ({"pp": 2, "layers_per_stage": (4, -1)}, "expected 2 numbers"),
        ({"vpp": 3}, "vpp is 3 with pp 1"),
        ({"pp": 2, "vpp": 2}, "3 layers cannot be shared out over 4 chunks"),
        ({"ep": 8}, r"experts \(4\) cannot be split into 8"),
        ({"tp": 8}, r"attention heads \(4\) cannot be split into 8"),
        ({"ep": 2, "etp": 3}, "ep 2 x etp 3 does not divide the 8 ranks"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused(sizes: dict[str, Any], message: str) -> None:
    architecture = tiny_architecture("qwen3_moe", num_layers=3)
    with pytest.raises(ValueError, match=message):
        megatron_layout(architecture, Grid(tuple(range(8)), **sizes)).on(0)


def test_experts_that_engines_cannot_share_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks of an engine \(4\) cannot be split into 3"):
        engine_layout(tiny_architecture("mixtral"), Grid((0, 1, 2, 3), tp=4, ep=3))
    few = replace(MOE["mixtral"], num_experts=2)
    with pytest.raises(ValueError, match=r"experts \(2\) cannot be split into 4"):
        engine_layout(tiny_architecture("mixtral", moe=few), Grid((0, 1, 2, 3), tp=4, ep=4)).on(0)


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_deepseek_v3_over_512_ranks_is_laid_out_in_a_moment(transformer_engine: bool) -> None:
    """61 layers of 256 experts; limits are several times what one free core takes."""
    architecture = deepseek_v3()
    training = Grid(tuple(range(512)), tp=4, pp=8, ep=16, etp=4)

    def sources() -> Layout:
        layout = megatron_layout(architecture, training, transformer_engine=transformer_engine)
        assert len({layout.part(part).pieces.tobytes() for part in layout.parts}) == 512
        return layout

    def destinations() -> Layout:
        layout = engine_layout(architecture, Grid(tuple(range(512, 768)), tp=32))
        assert all(len(layout.part(part).pieces) == len(layout.tensors.names) for part in range(32))
        return layout

    tensors, naming_s = fastest(lambda: canonical_tensors.__wrapped__(architecture))
    assert int(tensors.matrix_shapes.prod(axis=1).sum()) == 671_026_419_200
    source, sources_s = fastest(sources)
    _, destinations_s = fastest(destinations)
    assert max(elements_of(source.part(part).pieces) for part in source.parts) < 1.6 * 671e9 / 512
    assert naming_s < 0.3
    assert sources_s < 0.7
    assert destinations_s < 0.5


def fastest(make: Callable[[], Any]) -> tuple[Any, float]:
    """What `make` returns, and the fewest seconds of processor time that it took of three times."""
    took = []
    for _ in range(3):
        started = time.process_time()
        made = make()
        took.append(time.process_time() - started)
    return made, min(took)


def elements_of(pieces: np.ndarray) -> int:
    return int((pieces["rows"] * pieces["cols"]).sum())
