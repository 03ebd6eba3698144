"""Plans of all ranks, simulated in one process and compared with the oracle."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.models import Architecture
from rltrain.models.table import CanonicalTensors, uniform
from rltrain.reshard.layout import PIECE, Layout, RankLayout, elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Traffic, plan, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import PADDING, Tensors, tiny_architecture
from tests.unit.plan_simulation import ELEMENT_BYTES, WORLD_SIZE, Side, check_traffic, reshard, side

R8, NEXT8 = tuple(range(8)), tuple(range(8, 16))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    return tiny_architecture(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        num_layers=draw(st.sampled_from([1, 2, 4])),
        hidden_size=draw(st.integers(1, 9)),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 4])),
        head_dim=draw(st.sampled_from([2, 4, 8])),
        ffn_hidden_size=24 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(1, 150)),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def grids(draw: st.DrawFn, architecture: Architecture, kind: str) -> Grid:
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    fused_rows = (heads + 2 * kv_heads) * architecture.head_dim
    tps = [
        tp
        for tp in (1, 2, 3, 4, 6, 8)
        if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and fused_rows % tp == 0
    ]
    pps = [pp for pp in (1, 2, 4) if architecture.num_layers % pp == 0] if kind == "megatron" else [1]
    tp, pp = draw(st.sampled_from([(tp, pp) for tp in tps for pp in pps if tp * pp <= WORLD_SIZE]))
    dp = draw(st.integers(1, min(3, WORLD_SIZE // (tp * pp))))
    ranks = draw(st.permutations(range(WORLD_SIZE)))[: tp * pp * dp]
    return Grid(tuple(sorted(ranks)), tp=tp, pp=pp)


KINDS = st.sampled_from([("megatron", "engine")] * 4 + [("megatron", "hf"), ("hf", "megatron"), ("engine", "megatron")])


@settings(max_examples=25)
@given(st.data())
def test_every_element_is_written_once_and_as_the_oracle_says(data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    kinds = data.draw(KINDS)
    source, destination = (side(kind, architecture, data.draw(grids(architecture, kind))) for kind in kinds)
    ranks_per_node = data.draw(st.sampled_from([1, 4, 8, WORLD_SIZE]))
    check_traffic(reshard(source, destination, ranks_per_node), source, destination, ranks_per_node)


# name -> family, source grid and settings, destination grid and settings, ranks per node
EXPERTS: dict[str, tuple[str, Grid, dict[str, Any], Grid, dict[str, Any], int]] = {
    "colocated, experts whole -> cut": ("qwen3_moe", Grid(R8, tp=2, ep=4, etp=1), {}, Grid(R8, tp=4), {}, 4),
    "experts cut -> whole": ("mixtral", Grid(R8, tp=4, ep=2, etp=2), {}, Grid(R8, tp=4, ep=4, etp=1), {}, 8),
    "two stages to two nodes": ("deepseek_v3", Grid(R8, tp=2, pp=2, ep=2), {}, Grid(NEXT8, tp=4), {}, 4),
    "stages take turns": ("qwen3_moe", Grid(R8, pp=2, ep=4, vpp=2), {}, Grid(NEXT8, tp=2), {}, 8),
    "uneven stages": (
        "deepseek_v3", Grid(R8, tp=2, pp=2, ep=2, etp=1, layers_per_stage=(3, 1)), {},
        Grid(NEXT8, tp=4, ep=2, etp=2), {}, 2,
    ),
    "grouped experts": ("deepseek_v3", Grid(R8, tp=2, ep=4), {"transformer_engine": True}, Grid(NEXT8, tp=8), {}, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_and_interleaved_stages(case: str) -> None:
    family, source_grid, source_settings, grid, settings, ranks_per_node = EXPERTS[case]
    architecture = tiny_architecture(family, num_layers=4, num_heads=8)
    source = side("megatron", architecture, source_grid, **source_settings)
    destination = side("engine", architecture, grid, **settings)
    check_traffic(reshard(source, destination, ranks_per_node), source, destination, ranks_per_node)


@st.composite
def scattered_layouts(draw: st.DrawFn, tensors: CanonicalTensors) -> tuple[Layout, Layout]:
    """A source that deals the cells of a random grid over each tensor to ranks, and a destination of random boxes."""
    held: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    wanted: dict[int, list[tuple[int, ...]]] = {1: [], 2: [], 3: []}
    for tensor, shape in enumerate(tensors.matrix_shapes.tolist()):
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
        for row, row_end in zip(cuts[0], cuts[0][1:], strict=False):
            for col, col_end in zip(cuts[1], cuts[1][1:], strict=False):
                for rank in draw(st.sets(st.sampled_from([0, 1, 2]), min_size=1)):
                    held[rank].append((tensor, row, col, row_end - row, col_end - col))
        for rank in draw(st.sets(st.sampled_from([1, 2, 3]))):
            row, col = (draw(st.integers(0, size - 1)) for size in shape)
            rows, cols = (draw(st.integers(1, size - at)) for size, at in zip(shape, (row, col), strict=True))
            wanted[rank].append((tensor, row, col, rows, cols))
    return tuple(_boxes_layout(tensors, boxes) for boxes in (held, wanted))  # type: ignore[return-value]


def _boxes_layout(tensors: CanonicalTensors, boxes: dict[int, list[tuple[int, ...]]]) -> Layout:
    """Each box in a parameter of its own that is one column wider than the box, to have strides that matter."""

    def build(part: int) -> RankLayout:
        pieces = np.zeros(len(boxes[part]), dtype=PIECE)
        for number, (piece, box) in enumerate(zip(pieces, boxes[part], strict=True)):
            piece["tensor"], piece["row"], piece["col"], piece["rows"], piece["cols"] = box
            piece["parameter"], piece["offset"], piece["stride"] = number, 1, box[4] + 1
        shapes = [(box[3], box[4] + 1) for box in boxes[part]]
        return RankLayout(tuple((f"box{i}", shape) for i, shape in enumerate(shapes)), pieces)

    return Layout(tuple(boxes), tuple(boxes), tensors, uniform(len(tensors.names), "float32"), build)


def boxes_side(layout: Layout) -> Side:
    starts = np.cumsum([0, *layout.tensors.matrix_shapes.prod(axis=1)]) + 1
    shards: dict[int, Tensors] = {}
    for rank in layout.ranks:
        on = layout.on(rank)
        shards[rank] = {name: np.full(shape, PADDING, dtype=np.float32) for name, shape in on.parameters}
        for (name, _), piece in zip(on.parameters, on.pieces, strict=True):
            width = layout.tensors.matrix_shapes[piece["tensor"]][1]
            rows = np.arange(piece["row"], piece["row"] + piece["rows"])[:, None]
            values = starts[piece["tensor"]] + rows * width + np.arange(piece["col"], piece["col"] + piece["cols"])
            shards[rank][name].reshape(-1)[1:][: values.size + piece["rows"] - 1] = np.pad(
                values, ((0, 0), (0, 1)), constant_values=PADDING
            ).reshape(-1)[:-1]
    return Side(layout, shards)


@settings(max_examples=30)
@given(st.data())
def test_boxes_that_cross_in_rows_and_columns(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4))
    tensors = CanonicalTensors(tuple(f"tensor{i}" for i in range(len(shapes))), tuple(shapes))
    source, destination = data.draw(scattered_layouts(tensors))
    reshard(boxes_side(source), boxes_side(destination), ranks_per_node=data.draw(st.sampled_from([1, 2, 4])))


def test_boxes_that_begin_together_and_boxes_needed_twice() -> None:
    tensors = CanonicalTensors(("matrix", "vector"), ((6, 5), (9,)))
    whole = [(0, 0, 0, 6, 5), (1, 0, 0, 1, 9)]
    wanted = {
        4: [(0, 1, 1, 4, 3), (1, 0, 2, 1, 4), (0, 1, 1, 4, 3)],
        5: [(0, 1, 1, 2, 3), (1, 0, 2, 1, 4), (1, 0, 2, 1, 4)],
        6: [(0, 1, 1, 4, 2), (1, 0, 2, 1, 6)],
        7: [(0, 1, 1, 4, 3)],
    }
    source = boxes_side(_boxes_layout(tensors, {0: whole, 1: whole, 4: [(1, 0, 0, 1, 9)]}))
    destination = boxes_side(_boxes_layout(tensors, wanted))
    for ranks_per_node in (1, 2, 4, 8):
        reshard(source, destination, ranks_per_node)


def test_equal_layouts_on_equal_ranks_use_no_wire() -> None:
    architecture = tiny_architecture()
    layout = engine_layout(architecture, Grid((0, 1, 2, 3), tp=2))
    local = sum(int(elements(layout.on(rank).pieces).sum()) for rank in range(4)) * ELEMENT_BYTES
    for rank in range(4):
        made = plan(layout, layout, rank, ranks_per_node=4)
        assert made.traffic == Traffic(local=local, node=0, network_minimum=0)
        assert [len(boxes) for stage in (made.direct, made.fan_out) for boxes in (stage.sends, stage.receives)] == [
            0
        ] * 4
        assert elements(made.copies).sum() == elements(layout.on(rank).pieces).sum()


def test_tied_embeddings_are_two_replicas_under_pipeline_parallelism() -> None:
    architecture = tiny_architecture(tied_embeddings=True, vocab_size=64, hidden_size=64)
    source = megatron_layout(architecture, Grid((0, 1), pp=2))
    destination = engine_layout(architecture, Grid((1, 2)))
    embedding = 64 * 64
    ranks = reshard(side("megatron", architecture, Grid((0, 1), pp=2)), side("engine", architecture, Grid((1, 2))), 4)
    local = ranks[1].plan.copies
    assert elements(local[local["tensor"] == 0]).sum() == embedding, "rank 1 takes it from its own output layer"
    assert traffic(source, destination, 4)[1, 1] > embedding * ELEMENT_BYTES


def test_narrow_types_travel() -> None:
    architecture = tiny_architecture()
    layouts = [(megatron_layout, Grid((0,))), (engine_layout, Grid((1,)))]
    sizes = {}
    for types in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        source, destination = (
            build(architecture, grid, dtype=dtype) for (build, grid), dtype in zip(layouts, types, strict=True)
        )
        sizes[types] = traffic(source, destination, 1)[0, 1]
    assert sizes["float32", "bfloat16"] == sizes["bfloat16", "float32"] == sizes["float32", "float32"] // 2


def test_missing_elements_are_refused_by_name() -> None:
    architecture = tiny_architecture()
    source = megatron_layout(architecture, Grid((0, 1), tp=2))
    half = Layout(source.ranks[:1], source.parts[:1], source.tensors, source.types, source.build)
    destination = engine_layout(architecture, Grid((2,)))
    with pytest.raises(ValueError, match=r"holds 192 of 252 elements of model\.embed_tokens\.weight"):
        plan(half, destination, 2, 4)


def test_overlapping_sources_are_refused_by_name() -> None:
    architecture = tiny_architecture()
    whole, half = (megatron_layout(architecture, Grid(tuple(range(tp)), tp=tp)) for tp in (1, 2))
    mixed = Layout((0, 1), (0, 1), whole.tensors, whole.types, lambda part: (whole, half)[part].part(0))
    with pytest.raises(ValueError, match=r"overlapping but different boxes of a tensor: model\.embed_tokens"):
        plan(mixed, engine_layout(architecture, Grid((2,))), 2, 4)


def test_different_models_are_refused() -> None:
    source = megatron_layout(tiny_architecture(), Grid((0,)))
    destination = engine_layout(tiny_architecture(vocab_size=22), Grid((0,)))
    with pytest.raises(ValueError, match="different models"):
        plan(source, destination, 0, 1)


@pytest.mark.parametrize(
    ("case", "most_s"),
    [
        pytest.param("deepseek-v3, 512 ranks tp4 pp8 ep16 etp4 -> 256 ranks tp32", 5.0, marks=pytest.mark.slow),
        ("qwen3-30b-a3b, 64 ranks tp4 pp2 ep8 -> the same ranks tp8", 1.0),
    ],
)
def test_planning_for_a_large_job_takes_seconds(case: str, most_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "tools/benchmarks/plan.py", "--case", case],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    measured = json.loads(done.stdout.splitlines()[-1])["cases"][0]
    assert measured["plan_s"] < most_s, "seconds of one rank"
    assert measured["peak_mb"] < 1024
    assert measured["busiest_sender_gb"] > 1 and measured["predicted_network_s"] < 1.15 * measured["bound_network_s"]
