"""Tests of the places of all elements in layouts of Megatron, FSDP and engines."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import SyncMismatchError
from rltrain.models import Architecture, canonical_tensors
from rltrain.models.architecture import Unlisted
from rltrain.models.table import ITEM_BYTES, CanonicalTensors, ElementType
from rltrain.reshard.copy_table import MAX_ELEMENTS, bits_of
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout, holding, tensor_groups
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import converted, full_gather_sync, verify
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import (
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
from tests.support.plan_simulation import engine_places, megatron_places
from tools.benchmarks.model_shapes import deepseek_v3


def filled(layout: Layout, rank: int, full: Tensors) -> Tensors:
    """Returns the rank's parameters, filled from the whole tensors. Each element is written at most once."""
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


def assert_engine(architecture: Architecture, grid: Grid) -> None:
    full, layout = full_tensors(architecture), engine_layout(architecture, grid)
    for rank, place in engine_places(grid).items():
        assert_equal(filled(layout, rank, full), engine_shard(architecture, full, place))
        assert layout.on(rank) is layout.on(grid.ranks[place.tp_rank])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_megatron_layout(family: str, tied: bool, tp: int, pp: int, dp: int) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=4)
    assert_megatron(architecture, Grid(tuple(range(3, 3 + tp * pp * dp)), tp=tp, pp=pp))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (4, 1), (4, 2)])
def test_engine_layout(family: str, tied: bool, tp: int, dp: int) -> None:
    assert_engine(tiny_architecture(family, tied_embeddings=tied), Grid(tuple(range(tp * dp)), tp=tp))


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE_FAMILIES])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 4}], ids=str)
def test_value_models_of_megatron(family: str, tied: bool, sizes: dict[str, int]) -> None:
    """Every rank of the last stage has the whole score row and no copy of the embeddings."""
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=4).value_model()
    assert_megatron(architecture, Grid(tuple(range(2, 6)), **sizes))


def test_kv_heads_that_tensor_parallelism_exceeds() -> None:
    architecture = tiny_architecture(num_heads=8, num_kv_heads=2, head_dim=4)
    assert_megatron(architecture, Grid(tuple(range(8)), tp=8))
    assert_engine(architecture, Grid(tuple(range(8)), tp=8))


def assert_megatron(architecture: Architecture, grid: Grid, **settings: Any) -> None:
    """Expects the oracle's parameters on every rank. Ranks have the same part exactly if their parameters are equal."""
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
    assert_engine(VARIANTS[variant], Grid(tuple(range(4)), tp=tp))


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
    assert_engine(tiny_architecture(family), Grid(tuple(range(tp * dp)), tp=tp, ep=ep, etp=tp // ep))


def test_every_element_of_the_checkpoint_lies_somewhere() -> None:
    """Counts over all ranks. A part repeated over ranks counts once."""
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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 2, "layers_per_stage": (2, 2)}, r"layers_per_stage is \[2, 2\]; expected 2 numbers .* 3 layers"),
        ({"pp": 2, "layers_per_stage": (1, 1, 1)}, "expected 2 numbers"),
        ({"pp": 2, "layers_per_stage": (4, -1)}, "expected 2 numbers"),
        ({"vpp": 3}, "vpp is 3 with pp 1"),
        ({"pp": 2, "vpp": 2}, "3 layers cannot be divided among 4 chunks"),
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


def test_what_engines_cannot_share_out_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor parallelism alone"):
        engine_layout(tiny_architecture(), Grid((0, 1), pp=2))
    with pytest.raises(ValueError, match=r"ranks of an engine \(4\) cannot be split into 3"):
        engine_layout(tiny_architecture("mixtral"), Grid((0, 1, 2, 3), tp=4, ep=3))
    few = replace(MOE["mixtral"], num_experts=2)
    with pytest.raises(ValueError, match=r"experts \(2\) cannot be split into 4"):
        engine_layout(tiny_architecture("mixtral", moe=few), Grid((0, 1, 2, 3), tp=4, ep=4)).on(0)


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_deepseek_v3_over_512_ranks_is_laid_out_in_a_moment(transformer_engine: bool) -> None:
    """The model has 61 layers of 256 experts. The limits are several times the need of one free core."""
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
    """Returns the result of `make`, and the fewest seconds of processor time in three calls."""
    took = []
    for _ in range(3):
        started = time.process_time()
        made = make()
        took.append(time.process_time() - started)
    return made, min(took)


def elements_of(pieces: np.ndarray) -> int:
    return int((pieces["rows"] * pieces["cols"]).sum())


def transformers_parameters(full: Tensors) -> Tensors:
    """Returns the parameters of the transformers model. A layer's experts are in two parameters, with gate above up."""
    found: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in full.items():
        block, experts, matrix = name.partition(".experts.")
        renamed = block.replace("block_sparse_moe", "mlp")
        if not experts:
            found[renamed] = values
            continue
        if "." not in matrix:  # already a stack of all experts
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
    assert canonical_tensors(architecture.value_model()).names == (*tensors.names[:3], "score.weight")


def test_both_backends_have_the_same_tensors() -> None:
    """This allows weights and states to move between the backends."""
    architecture = tiny_architecture("qwen3_moe")
    grid = Grid((0, 1))
    assert fsdp_layout(architecture, replace(grid, copies=1)).tensors is megatron_layout(architecture, grid).tensors


GRIDS = (Grid((0,)), Grid((0, 1), tp=2), Grid((0, 1), pp=2), Grid((0, 1, 2, 3), tp=2, pp=2))


def pieces_of(layout: Layout, rank: int) -> Counter[tuple[object, ...]]:
    """Counts (parameter, shape, box, place) of all pieces."""
    mine = layout.on(rank)
    return Counter(
        (*mine.parameters[piece["parameter"]], *(int(piece[name]) for name in piece.dtype.names if name != "parameter"))
        for piece in mine.pieces
    )


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "llama", *MOE]),
    tied=st.booleans(),
    grid=st.sampled_from(GRIDS),
    engine=st.booleans(),
    max_bytes=st.sampled_from([1, 3000, 20_000, 10**9]),
)
def test_the_groups_of_a_layout_have_all_of_it_once(
    family: str, tied: bool, grid: Grid, engine: bool, max_bytes: int
) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied)
    grid = Grid(grid.ranks, tp=grid.tp) if engine else grid
    layout = engine_layout(architecture, grid) if engine else megatron_layout(architecture, grid)
    groups = list(tensor_groups(layout.tensors, layout.types, max_bytes))
    assert np.array_equal(np.sum(groups, axis=0), np.ones(len(layout.types)))
    for rank in grid.ranks:
        found = sum((pieces_of(holding(layout, group), rank) for group in groups), start=Counter())
        assert found == pieces_of(layout, rank)
        for group in groups:
            held = holding(layout, group).on(rank)
            assert set(held.pieces["parameter"].tolist()) == set(range(len(held.parameters)))


def test_a_group_has_whole_layers_and_no_more_than_it_may_but_for_one() -> None:
    architecture = tiny_architecture("qwen3", num_layers=6)
    layout = megatron_layout(architecture, Grid((0,)))
    sizes = layout.tensors.matrix_shapes.prod(axis=1) * ITEM_BYTES[layout.types]
    names = np.array(layout.tensors.names)
    of_layers = [np.char.find(names, f".layers.{number}.") >= 0 for number in range(6)]
    of_one = int(sizes[of_layers[0]].sum())
    for count in (1, 2, 4):
        groups = list(tensor_groups(layout.tensors, layout.types, count * of_one))
        assert len(groups) == -(-6 // count)
        assert all(sum(group[layer].all() for group in groups) == 1 for layer in of_layers)


ARCHITECTURE = tiny_architecture("qwen2")
ONE_RANK = Grid((0,))


def both_shards() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    full = full_tensors(ARCHITECTURE)
    cut = megatron_shard(ARCHITECTURE, full, Place()), engine_shard(ARCHITECTURE, full, Place())
    held, expected = ({name: torch.tensor(values) for name, values in shard.items()} for shard in cut)
    return held, expected


def test_one_rank_needs_no_group() -> None:
    source, destination = megatron_layout(ARCHITECTURE, ONE_RANK), engine_layout(ARCHITECTURE, ONE_RANK)
    held, expected = both_shards()
    wanted = {name: torch.full_like(tensor, PADDING) for name, tensor in expected.items()}
    full_gather_sync(source, destination, held, wanted, None)
    assert all(torch.equal(wanted[name], expected[name]) for name in expected)
    made = plan(source, destination, 0, 1)
    verify(made, source, destination, held, wanted, group=None)
    held["decoder.final_layernorm.weight"][5] = wanted["model.norm.weight"][5] = torch.nan
    verify(made, source, destination, held, wanted, group=None)
    wanted["model.norm.weight"].view(torch.int32)[5] += 1  # another NaN, if nothing is converted
    with pytest.raises(
        SyncMismatchError, match=r"model\.norm\.weight differs on rank\(s\) 0 from what rank\(s\) 0 sent"
    ):
        verify(made, source, destination, held, wanted, group=None)


def test_a_tensor_that_no_rank_holds_in_full_is_refused_by_name() -> None:
    source, destination = megatron_layout(ARCHITECTURE, Grid((0, 1), tp=2)), engine_layout(ARCHITECTURE, ONE_RANK)
    half = Layout(source.ranks[:1], source.parts[:1], source.tensors, source.types, source.build)
    shard = megatron_shard(ARCHITECTURE, full_tensors(ARCHITECTURE), Place(tp=2))
    held = {name: torch.tensor(values) for name, values in shard.items()}
    with pytest.raises(ValueError, match=r"holds 192 of 252 elements of model\.embed_tokens\.weight"):
        full_gather_sync(half, destination, held, both_shards()[1], None)


def test_tensors_that_are_missing_or_of_another_type_are_refused() -> None:
    source, destination = megatron_layout(ARCHITECTURE, ONE_RANK), engine_layout(ARCHITECTURE, ONE_RANK)
    held, wanted = both_shards()
    with pytest.raises(ValueError, match="rank 0 is in the layout of ranks"):
        full_gather_sync(source, destination, held, None, None)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32"):
        full_gather_sync(source, destination, held, {name: tensor.bfloat16() for name, tensor in wanted.items()}, None)


def test_conversions_have_the_prescribed_nans() -> None:
    values = torch.tensor([1.0, torch.nan, -torch.nan, torch.inf])
    assert converted(values, torch.bfloat16).view(torch.int16).tolist() == [0x3F80, 0x7FFF, 0x7FFF, 0x7F80]
    assert converted(values, torch.float16).view(torch.int16).tolist() == [0x3C00, 0x7FFF, 0x7FFF, 0x7C00]
    assert converted(values.half(), torch.float32).view(torch.int32)[1:3].tolist() == [0x7FFFFFFF] * 2
    kept = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert converted(kept, torch.float32).view(torch.int32).tolist() == [0x7FC10000]


def test_bits_of_nan_count_only_where_they_must_be_kept() -> None:
    for dtype, integers in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        nans = torch.tensor([[torch.nan, -torch.nan, torch.inf, -torch.inf, -1.0]]).to(dtype)
        nans.view(integers)[0, 0] -= 2
        exact, loose = (bits_of(nans, exact=exact)[0].tolist() for exact in (True, False))
        assert exact[0] != exact[1] and loose[0] == loose[1]
        assert exact[2:] == loose[2:] and len(set(loose)) == 4
    float8 = torch.tensor([[0x7F, 0xFF, 0x7E, 0xFE]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    loose = bits_of(float8, exact=False)[0].tolist()
    assert loose[0] == loose[1] and loose[2:] == [0x7E, 0xFE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_boxes_are_read_in_place_and_converted_in_steps(dtype: str) -> None:
    """Covers a vector longer than a step and a matrix of several steps, with a plan that copies them."""
    width = MAX_ELEMENTS // 3
    architecture = tiny_architecture("llama", num_layers=1, hidden_size=width, num_heads=1, num_kv_heads=1, head_dim=2,
                                     ffn_hidden_size=5, vocab_size=7)  # fmt: skip
    source, destination = megatron_layout(architecture, ONE_RANK), engine_layout(architecture, ONE_RANK, dtype=dtype)
    held = {name: torch.arange(float(np.prod(s))).reshape(s) for name, s in source.on(0).parameters}
    wanted = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in destination.on(0).parameters}
    full_gather_sync(source, destination, held, wanted, None)
    made = plan(source, destination, 0, 1)
    verify(made, source, destination, held, wanted, group=None)
    rows = wanted["model.layers.0.mlp.gate_up_proj.weight"]
    rows[[0, 3]] = rows[[3, 0]]  # at the same place in different steps
    with pytest.raises(SyncMismatchError, match=r"gate_proj\.weight differs"):
        verify(made, source, destination, held, wanted, group=None)
