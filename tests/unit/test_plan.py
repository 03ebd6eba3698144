"""The plan of a reshard moves every box once and balances the work."""

import json
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.models import Architecture
from rltrain.models.table import ITEM_BYTES, CanonicalTensors, ElementType, uniform
from rltrain.reshard.layout import BOX_FIELDS, PIECE, Layout, RankLayout, elements, parameter_types, split
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Planner, Traffic, plan, pour, share_out, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import PADDING, Tensors, tiny_architecture
from tests.support.plan_simulation import (
    ELEMENT_BYTES,
    WORLD_SIZE,
    Side,
    check_traffic,
    execute_all,
    reshard,
    side,
    simulated_rank,
)

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
    """Draws a source and a destination. The source deals the cells of random grids over tensors to ranks. The
    destination has random boxes."""
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
    """Puts each box into a separate parameter. It is one column wider than the box, so that strides matter."""

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
    assert elements(local[local["tensor"] == 0]).sum() == embedding, "rank 1 copies it from its own output layer"
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
    assert measured["plan_s"] < most_s, "planning took one rank too many seconds"
    assert measured["peak_mb"] < 1024
    assert measured["busiest_sender_gb"] > 1 and measured["predicted_network_s"] < 1.15 * measured["bound_network_s"]


def sent_by_rank(moved: dict[tuple[int, int], int]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for (source, destination), num_bytes in moved.items():
        if source != destination:
            totals[source] = totals.get(source, 0) + num_bytes
    return totals


@pytest.mark.parametrize(("destinations", "tp"), [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (8, 1)])
def test_replicas_share_the_work(destinations: int, tp: int) -> None:
    architecture = tiny_architecture(num_layers=8, vocab_size=40)
    source = megatron_layout(architecture, Grid((0, 1, 2, 3)))
    destination = engine_layout(architecture, Grid(tuple(range(4, 4 + destinations)), tp=tp))
    sent = sent_by_rank(traffic(source, destination, ranks_per_node=16))
    largest = int(elements(source.on(0).pieces).max())
    assert len(sent) == 4
    assert max(sent.values()) <= sum(sent.values()) / 4 + largest * ELEMENT_BYTES


def test_replicas_share_the_work_where_some_groups_leave_less_choice() -> None:
    architecture = tiny_architecture(num_layers=16, vocab_size=40)
    source = megatron_layout(architecture, Grid((0, 1, 4)))  # nodes of two ranks: 0, 1 | 4
    destination = engine_layout(architecture, Grid((5, 6)))  # 5 must receive from 4, 6 may receive from all three
    sent = sent_by_rank(traffic(source, destination, ranks_per_node=2))
    assert sent[4] == sent[0] + sent[1]
    assert abs(sent[0] - sent[1]) <= 2 * int(elements(source.on(0).pieces).max()) * ELEMENT_BYTES


def test_a_replica_on_the_same_node_is_preferred() -> None:
    architecture = tiny_architecture()
    source = megatron_layout(architecture, Grid((0, 1, 8, 9), tp=2))
    destination = engine_layout(architecture, Grid((2, 3, 10, 11), tp=2))
    moved = traffic(source, destination, ranks_per_node=8)
    assert {source // 8 == destination // 8 for source, destination in moved} == {True}


def smallest_load_by_hall(candidates: list[list[int]], demands: list[int]) -> float:
    """Computes the smallest possible load by Hall's theorem. Each set of ranks gives a bound: the demand that only this
    set can carry, divided by its size. The result is the largest bound."""
    ranks = sorted({rank for group in candidates for rank in group})
    subsets = [set(subset) for size in range(1, len(ranks) + 1) for subset in combinations(ranks, size)]
    return max(
        sum(demand for group, demand in zip(candidates, demands, strict=True) if subset.issuperset(group)) / len(subset)
        for subset in subsets
    )


def smallest_largest_load(source: Side, destination: Side, ranks_per_node: int) -> float:
    """Returns the smallest possible bytes of the busiest sender. Holders on the receiver's node are preferred.

    Every element has a unique value. So the values alone identify its holders and receivers.
    """

    def owners(side_of: Side) -> dict[float, set[int]]:
        found: dict[float, set[int]] = {}
        for rank, shards in side_of.shards.items():
            for value in np.unique(np.concatenate([tensor.reshape(-1) for tensor in shards.values()])).tolist():
                found.setdefault(value, set()).add(rank)
        found.pop(PADDING, None)
        return found

    holders, demands = owners(source), Counter[frozenset[int]]()
    for value, needed_by in owners(destination).items():
        by_node: dict[int, set[int]] = {}
        for rank in needed_by - holders[value]:
            by_node.setdefault(rank // ranks_per_node, set()).add(rank)
        for node, ranks in by_node.items():
            near = {rank for rank in holders[value] if rank // ranks_per_node == node}
            demands[frozenset(near or holders[value])] += ELEMENT_BYTES * (len(ranks) if near else 1)
    return smallest_load_by_hall([[*candidates] for candidates in demands], [*demands.values()])


# name -> source (ranks, tp, pp), destination (ranks, tp), ranks per node
BALANCED = {
    "replicas feed fewer engines": ((range(4), 1, 1), (range(4, 7), 1), 16),
    "tp2 dp3 on two nodes": ((range(6), 2, 1), (range(6, 10), 2), 4),
    "pp2 dp2 to one node of engines": ((range(4), 1, 2), (range(4, 8), 2), 4),
    "some destinations hold what they need": ((range(6), 2, 1), (range(4, 10), 1), 2),
    "colocated": ((range(8), 2, 2), (range(8), 4), 4),
    "a node with a single holder": (((0, 1, 4), 1, 1), ((5, 6), 1), 2),
}


@pytest.mark.parametrize("case", BALANCED)
@pytest.mark.parametrize("tied", [False, True])
def test_the_busiest_sender_carries_at_most_15_percent_more_than_it_must(case: str, tied: bool) -> None:
    (sources, tp, pp), (destinations, engine_tp), ranks_per_node = BALANCED[case]
    architecture = tiny_architecture(
        num_layers=4, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=8, ffn_hidden_size=48, vocab_size=128,
        tied_embeddings=tied,
    )  # fmt: skip
    source = side("megatron", architecture, Grid(tuple(sources), tp=tp, pp=pp))
    destination = side("engine", architecture, Grid(tuple(destinations), tp=engine_tp))
    sent: Counter[int] = Counter()
    planner = Planner(source.layout, destination.layout, ranks_per_node)
    for rank in source.layout.ranks:
        sent[rank] = planner.bytes_of(planner.plan(rank).direct.sends)
    assert max(sent.values()) <= 1.15 * smallest_largest_load(source, destination, ranks_per_node)


def test_a_node_receives_once_and_fans_out_evenly() -> None:
    architecture = tiny_architecture(num_layers=4, hidden_size=32, num_heads=4, head_dim=8, vocab_size=64)
    source, destination = Grid((0, 1), tp=2), Grid((4, 5, 6, 7))
    planner = Planner(megatron_layout(architecture, source), engine_layout(architecture, destination), 4)
    model_bytes = int(elements(planner.destination.on(4).pieces).sum()) * ELEMENT_BYTES
    assert planner.traffic == Traffic(local=0, node=3 * model_bytes, network_minimum=model_bytes)
    plans = [planner.plan(rank) for rank in destination.ranks]
    entered = [planner.bytes_of(made.direct.receives) for made in plans]
    assert sum(entered) == model_bytes and max(entered) < 1.05 * model_bytes / 4
    assert [planner.bytes_of(made.fan_out.sends) for made in plans] == [3 * num_bytes for num_bytes in entered]


NUM_RANKS = 7


GROUPS = st.lists(
    st.tuples(st.sets(st.integers(0, NUM_RANKS - 1), min_size=1).map(sorted), st.integers(0, 10**12)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=75)
@given(GROUPS)
def test_the_busiest_carries_hardly_more_than_it_must(groups: list[tuple[list[int], int]]) -> None:
    candidates, demands = [group for group, _ in groups], [demand for _, demand in groups]
    quotas = share_out([np.array(group) for group in candidates], demands)
    load = np.zeros(NUM_RANKS, dtype=np.int64)
    for group, demand, quota in zip(candidates, demands, quotas, strict=True):
        assert (quota >= 0).all() and quota.sum() == demand
        load[group] += quota
    assert load.max() <= 1.15 * smallest_load_by_hall(candidates, demands) + NUM_RANKS


def test_a_chain_of_choices_is_followed_to_its_end() -> None:
    """Rank 0 has too much. The other ranks can relieve it only in a chain, each through the next one."""
    size, demand = 12, 10**9
    chain = [np.array([rank, rank + 1]) for rank in reversed(range(size - 1))]
    quotas = share_out([*chain, np.array([0])], [*[demand] * (size - 1), demand])
    load = np.zeros(size)
    for ranks, quota in zip([*chain, np.array([0])], quotas, strict=True):
        load[ranks] += quota
    assert load.max() <= 1.01 * demand


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=20), st.integers(0, 10**16))
def test_water_finds_its_level(held: list[int], amount: int) -> None:
    load = np.array(held)
    quota = pour(load, amount)
    assert quota.sum() == amount and (quota >= 0).all()
    filled = (load + quota)[quota > 0]
    assert len(filled) == 0 or filled.max() - filled.min() <= 1
    assert len(filled) == 0 or (load[quota == 0] >= filled.max() - 1).all()


def held_boxes(layout: Layout, rank: int) -> list[tuple[object, ...]]:
    """Returns every piece with the name and shape of its parameter."""
    on = layout.on(rank)
    fields = [*BOX_FIELDS, "offset", "stride"]
    return [(*on.parameters[piece["parameter"]], *(int(piece[name]) for name in fields)) for piece in on.pieces]


def sizes(layout: Layout, rank: int) -> list[int]:
    elements = [int(np.prod(shape)) for _, shape in layout.on(rank).parameters]
    types = parameter_types(layout, layout.parts[layout.ranks.index(rank)])
    return [count * int(ITEM_BYTES[kind]) for count, kind in zip(elements, types, strict=True)]


@settings(max_examples=25)
@given(st.data())
def test_parts_together_are_the_layout_and_each_can_be_planned_and_executed_alone(data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    kinds = data.draw(KINDS)
    source, destination = (side(kind, architecture, data.draw(grids(architecture, kind))) for kind in kinds)
    max_bytes = data.draw(st.integers(1, 20_000))
    ranks_per_node = data.draw(st.sampled_from([1, 4, 14]))
    parts = split(destination.layout, max_bytes)
    for rank in destination.layout.ranks:
        of_parts = [part.on(rank).parameters for part in parts]
        assert sum(of_parts, ()) == destination.layout.on(rank).parameters
        boxes = [box for part in parts for box in held_boxes(part, rank)]
        assert sorted(boxes, key=repr) == sorted(held_boxes(destination.layout, rank), key=repr)
        for part in parts:
            assert sum(sizes(part, rank)) <= max_bytes or len(part.on(rank).parameters) == 1
    whole = reshard(source, destination, ranks_per_node)
    written: dict[int, Tensors] = {rank: {} for rank in whole}
    for part in parts:
        planner = Planner(source.layout, part, ranks_per_node)
        ranks = {rank: simulated_rank(planner.plan(rank), source.shards.get(rank, {})) for rank in whole}
        execute_all(ranks)
        for number, rank in ranks.items():
            for (name, _), values in zip(rank.plan.destination_parameters, rank.destination, strict=True):
                assert name not in written[number]
                written[number][name] = values
    for number, rank in whole.items():
        expected = dict(zip([name for name, _ in rank.plan.destination_parameters], rank.destination, strict=True))
        assert written[number].keys() == expected.keys()
        assert all(np.array_equal(written[number][name], expected[name]) for name in expected)


def test_as_many_parameters_per_part_as_fit() -> None:
    layout = engine_layout(tiny_architecture(num_layers=2), Grid((0,)))
    every = sizes(layout, 0)
    assert len(split(layout, sum(every))) == 1
    assert [len(part.on(0).parameters) for part in split(layout, 1)] == [1] * len(every)
    parts = split(layout, max(every))
    for part, following in zip(parts, parts[1:], strict=False):
        assert sum(sizes(part, 0)) + sizes(following, 0)[0] > max(every), "the next parameter would have fitted"


def test_a_parameter_of_padding_alone_has_the_type_of_its_namesakes() -> None:
    """64 rows of vocabulary are cut for four ranks. Only the first rank has real rows."""
    architecture = tiny_architecture("qwen2", vocab_size=9, num_heads=4, num_kv_heads=4)
    layout = engine_layout(architecture, Grid((0, 1, 2, 3), tp=4), dtype="bfloat16")
    layout.types[layout.tensors.numbers["model.embed_tokens.weight"]] = ElementType.FLOAT32
    names = [name for name, _ in layout.part(3).parameters]
    number = names.index("model.embed_tokens.weight")
    assert number not in layout.part(3).pieces["parameter"], "this share has rows, and the test shows nothing"
    kinds = parameter_types(layout, 3)
    assert kinds[number] == ElementType.FLOAT32
    assert kinds[names.index("lm_head.weight")] == ElementType.BFLOAT16
    assert np.array_equal(kinds, parameter_types(layout, 0))


def test_shares_with_different_parameters() -> None:
    """These are stages of a pipeline. Stages with fewer parameters have none in the last parts."""
    architecture = tiny_architecture("qwen3", num_layers=3)
    grid = Grid((0, 1), pp=2, layers_per_stage=(2, 1))
    destination = side("megatron", architecture, grid)
    source = side("engine", architecture, Grid((0,)))
    parts = split(destination.layout, 1)
    assert parts[-1].on(0).parameters and not parts[-1].on(1).parameters
    for part in parts:
        shards = {
            rank: {name: destination.shards[rank][name] for name, _ in part.on(rank).parameters} for rank in grid.ranks
        }
        reshard(source, Side(part, shards), 2)


def test_no_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes is 0"):
        split(engine_layout(tiny_architecture(), Grid((0,))), 0)
