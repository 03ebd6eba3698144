"""Plans, with all ranks simulated in one process and boxes moved by numpy."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.hf import hf_layout
from rltrain.cluster.grid import Grid
from rltrain.reshard.buckets import messages_by_bucket
from rltrain.reshard.families import Architecture
from rltrain.reshard.layout import BOX_FIELDS, PIECE, CanonicalTensors, Layout, RankLayout
from rltrain.reshard.match import elements
from rltrain.reshard.plan import RankPlan, plan, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.training.layout import megatron_layout
from tests.model_shards import PADDING, Place, Tensors, engine_shard, full_tensors, megatron_shard, tiny_architecture

WORLD_SIZE = 14


@dataclass(frozen=True)
class Side:
    """A layout and what the oracle says each of its ranks holds."""

    layout: Layout
    shards: dict[int, Tensors]


def side(kind: str, architecture: Architecture, grid: Grid) -> Side:
    full = full_tensors(architecture)
    places = {rank: grid.coordinates(rank) for rank in grid.ranks}
    if kind == "megatron":
        shards = {
            rank: megatron_shard(architecture, full, Place(grid.tp, at.tp, grid.pp, at.pp))
            for rank, at in places.items()
        }
        return Side(megatron_layout(architecture, grid), shards)
    if kind == "engine":
        shards = {rank: engine_shard(architecture, full, Place(grid.tp, at.tp)) for rank, at in places.items()}
        return Side(engine_layout(architecture, grid), shards)
    layout = hf_layout(architecture, grid.ranks)
    shards = {rank: {name: full[name] for name, _ in layout.on(rank).parameters} for rank in grid.ranks}
    return Side(layout, shards)


def addresses(box: np.void, prefix: str = "") -> np.ndarray:
    """[rows, cols] element numbers of a box in its parameter."""
    rows = np.arange(box["rows"])[:, None] * box[prefix + "stride"]
    return box[prefix + "offset"] + rows + np.arange(box["cols"])


@dataclass
class Rank:
    plan: RankPlan
    source: list[np.ndarray]
    destination: list[np.ndarray]
    written: list[np.ndarray]

    def write(self, box: np.void, values: np.ndarray, prefix: str = "") -> None:
        where, parameter = addresses(box, prefix), box[prefix + "parameter"]
        self.destination[parameter][where] = values
        self.written[parameter][where] += 1


def simulated_rank(source: Layout, destination: Layout, held: Tensors, rank: int, ranks_per_node: int) -> Rank:
    made = plan(source, destination, rank, ranks_per_node)
    sizes = [int(np.prod(shape)) for _, shape in made.destination_parameters]
    return Rank(
        plan=made,
        source=[held[name].reshape(-1) for name, _ in made.source_parameters],
        destination=[np.full(size, PADDING, dtype=np.float32) for size in sizes],
        written=[np.zeros(size, dtype=np.int64) for size in sizes],
    )


def execute_all(ranks: dict[int, Rank], message_elements: int) -> None:
    """Move every box, bucket by bucket; what a sender packs is all that its receiver gets to see."""
    wires: dict[tuple[int, int, int], np.ndarray] = {}
    for number, rank in ranks.items():
        for bucket, messages in messages_by_bucket(rank.plan.sends, message_elements).items():
            for message in messages:
                packed = [rank.source[box["parameter"]][addresses(box)].reshape(-1) for box in message.boxes]
                wires[number, message.peer, bucket] = np.concatenate(packed)
                assert 0 < message.size == len(wires[number, message.peer, bucket]) <= message_elements
        for box in rank.plan.copies:
            rank.write(box, rank.source[box["source_parameter"]][addresses(box, "source_")], "destination_")
    for number, rank in ranks.items():
        for bucket, messages in messages_by_bucket(rank.plan.receives, message_elements).items():
            for message in messages:
                wire = wires.pop((message.peer, number, bucket))
                assert len(wire) == message.size
                parts = np.split(wire, np.cumsum(elements(message.boxes))[:-1])
                for box, part in zip(message.boxes, parts, strict=True):
                    rank.write(box, part.reshape(box["rows"], box["cols"]))
    assert not wires, "every message that is sent is received"


def check_ends_agree(ranks: dict[int, Rank]) -> None:
    for number, rank in ranks.items():
        for peer in np.unique(rank.plan.sends["peer"]):
            sent = rank.plan.sends[rank.plan.sends["peer"] == peer]
            theirs = ranks[int(peer)].plan.receives
            received = theirs[theirs["peer"] == number]
            for name in BOX_FIELDS:
                assert np.array_equal(sent[name], received[name])
        assert number not in rank.plan.sends["peer"] and number not in rank.plan.receives["peer"]


def check_totals(ranks: dict[int, Rank], moved: dict[tuple[int, int], int], element_bytes: int) -> None:
    for number, rank in ranks.items():
        for peer in set(rank.plan.sends["peer"].tolist()):
            sent = int(elements(rank.plan.sends[rank.plan.sends["peer"] == peer]).sum())
            assert moved[number, peer] == sent * element_bytes
        assert moved.get((number, number), 0) == int(elements(rank.plan.copies).sum()) * element_bytes
    wire = sum(num_bytes for (source, destination), num_bytes in moved.items() if source != destination)
    for rank in ranks.values():
        assert rank.plan.total_wire_elements * element_bytes == wire
        assert (rank.plan.total_wire_elements + rank.plan.total_local_elements) * element_bytes == sum(moved.values())
        for boxes in (rank.plan.sends, rank.plan.receives):
            assert len(np.unique(boxes["peer"])) <= rank.plan.max_peers


def reshard(source: Side, destination: Side, ranks_per_node: int, message_elements: int) -> dict[int, Rank]:
    """Plan and execute on all ranks, and compare everything that comes out with the oracle."""
    numbers = sorted({*source.layout.ranks, *destination.layout.ranks})
    ranks = {
        rank: simulated_rank(source.layout, destination.layout, source.shards.get(rank, {}), rank, ranks_per_node)
        for rank in numbers
    }
    check_ends_agree(ranks)
    execute_all(ranks, message_elements)
    for number, rank in ranks.items():
        for index, (name, _) in enumerate(rank.plan.destination_parameters):
            expected = destination.shards[number][name].reshape(-1)
            assert np.array_equal(rank.destination[index], expected), f"{name} on rank {number}"
            assert np.array_equal(rank.written[index], (expected != PADDING).astype(np.int64)), f"{name} on {number}"
        assert len(rank.plan.destination_parameters) == len(destination.shards.get(number, {}))
    check_totals(ranks, traffic(source.layout, destination.layout, ranks_per_node, element_bytes=2), element_bytes=2)
    return ranks


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


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_element_is_written_once_and_as_the_oracle_says(data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    kinds = data.draw(KINDS)
    source, destination = (side(kind, architecture, data.draw(grids(architecture, kind))) for kind in kinds)
    ranks_per_node = data.draw(st.sampled_from([1, 4, 8, WORLD_SIZE]))
    reshard(source, destination, ranks_per_node, message_elements=data.draw(st.sampled_from([1, 7, 64, 10**6])))


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

    return Layout(tuple(boxes), tuple(boxes), tensors, build)


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_that_cross_in_rows_and_columns(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4))
    tensors = CanonicalTensors(tuple(f"tensor{i}" for i in range(len(shapes))), tuple(shapes))
    source, destination = data.draw(scattered_layouts(tensors))
    reshard(
        boxes_side(source), boxes_side(destination), ranks_per_node=2, message_elements=data.draw(st.integers(1, 9))
    )


def test_equal_layouts_on_equal_ranks_use_no_wire() -> None:
    architecture = tiny_architecture()
    layout = engine_layout(architecture, Grid((0, 1, 2, 3), tp=2))
    for rank in range(4):
        made = plan(layout, layout, rank, ranks_per_node=4)
        assert len(made.sends) == len(made.receives) == made.total_wire_elements == made.max_peers == 0
        assert elements(made.copies).sum() == elements(layout.on(rank).pieces).sum()


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
    sent = sent_by_rank(traffic(source, destination, ranks_per_node=16, element_bytes=1))
    largest = int(elements(source.on(0).pieces).max())
    assert len(sent) == 4
    assert max(sent.values()) <= sum(sent.values()) / 4 + largest


def test_replicas_share_the_work_where_some_groups_leave_less_choice() -> None:
    architecture = tiny_architecture(num_layers=16, vocab_size=40)
    source = megatron_layout(architecture, Grid((0, 1, 4)))  # nodes of two ranks: 0, 1 | 4
    destination = engine_layout(architecture, Grid((5, 6)))  # 5 must draw on 4, 6 may draw on all three
    sent = sent_by_rank(traffic(source, destination, ranks_per_node=2, element_bytes=1))
    assert sent[4] == sent[0] + sent[1]
    assert abs(sent[0] - sent[1]) <= 2 * int(elements(source.on(0).pieces).max())


def test_a_replica_on_the_same_node_is_preferred() -> None:
    architecture = tiny_architecture()
    source = megatron_layout(architecture, Grid((0, 1, 8, 9), tp=2))
    destination = engine_layout(architecture, Grid((2, 3, 10, 11), tp=2))
    moved = traffic(source, destination, ranks_per_node=8, element_bytes=2)
    assert {source // 8 == destination // 8 for source, destination in moved} == {True}


def test_tied_embeddings_are_two_replicas_under_pipeline_parallelism() -> None:
    architecture = tiny_architecture(tied_embeddings=True, vocab_size=64, hidden_size=64)
    source = megatron_layout(architecture, Grid((0, 1), pp=2))
    destination = engine_layout(architecture, Grid((1, 2)))
    embedding = 64 * 64
    ranks = reshard(
        side("megatron", architecture, Grid((0, 1), pp=2)), side("engine", architecture, Grid((1, 2))), 4, 1000
    )
    local = ranks[1].plan.copies
    assert elements(local[local["tensor"] == 0]).sum() == embedding, "rank 1 takes it from its own output layer"
    assert traffic(source, destination, 4, 1)[1, 1] > embedding


def test_missing_elements_are_refused_by_name() -> None:
    architecture = tiny_architecture()
    source = megatron_layout(architecture, Grid((0, 1), tp=2))
    half = Layout(source.ranks[:1], source.parts[:1], source.tensors, source.build)
    destination = engine_layout(architecture, Grid((2,)))
    with pytest.raises(ValueError, match=r"holds 192 of 252 elements of model\.embed_tokens\.weight"):
        plan(half, destination, 2, 4)


def test_overlapping_sources_are_refused_by_name() -> None:
    architecture = tiny_architecture()
    whole, half = (megatron_layout(architecture, Grid(tuple(range(tp)), tp=tp)) for tp in (1, 2))
    mixed = Layout((0, 1), (0, 1), whole.tensors, lambda part: (whole, half)[part].part(0))
    with pytest.raises(ValueError, match=r"overlapping but different boxes of a tensor: model\.embed_tokens"):
        plan(mixed, engine_layout(architecture, Grid((2,))), 2, 4)


def test_different_models_are_refused() -> None:
    source = megatron_layout(tiny_architecture(), Grid((0,)))
    destination = engine_layout(tiny_architecture(vocab_size=22), Grid((0,)))
    with pytest.raises(ValueError, match="different models"):
        plan(source, destination, 0, 1)


def test_planning_for_a_large_job_takes_seconds() -> None:
    architecture = tiny_architecture(
        num_layers=64, hidden_size=5120, num_heads=64, num_kv_heads=8, head_dim=128, ffn_hidden_size=25600,
        vocab_size=151936,
    )  # fmt: skip
    start = time.process_time()
    source = megatron_layout(architecture, Grid(tuple(range(64)), tp=8, pp=4))
    made = plan(source, engine_layout(architecture, Grid(tuple(range(64)), tp=4)), 40, ranks_per_node=8)
    assert time.process_time() - start < 10
    assert len(made.receives) + len(made.copies) > 64 * 7
