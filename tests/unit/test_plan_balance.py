"""Who sends what: nearness, balance over senders, one entry per node."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from rltrain.reshard.layout import elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Planner, Traffic, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import PADDING, tiny_architecture
from tests.unit.plan_simulation import ELEMENT_BYTES, Side, side


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
    destination = engine_layout(architecture, Grid((5, 6)))  # 5 must draw on 4, 6 may draw on all three
    sent = sent_by_rank(traffic(source, destination, ranks_per_node=2))
    assert sent[4] == sent[0] + sent[1]
    assert abs(sent[0] - sent[1]) <= 2 * int(elements(source.on(0).pieces).max()) * ELEMENT_BYTES


def test_a_replica_on_the_same_node_is_preferred() -> None:
    architecture = tiny_architecture()
    source = megatron_layout(architecture, Grid((0, 1, 8, 9), tp=2))
    destination = engine_layout(architecture, Grid((2, 3, 10, 11), tp=2))
    moved = traffic(source, destination, ranks_per_node=8)
    assert {source // 8 == destination // 8 for source, destination in moved} == {True}


def smallest_largest_load(source: Side, destination: Side, ranks_per_node: int) -> float:
    """The least bytes that the busiest sender can carry, with holders on the receiver's node preferred.

    From values alone: every element has one of its own, which tells who holds it and who needs it. By Hall's theorem
    the bound is the largest, over sets of senders, of what only they may send divided by their number.
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
    senders = sorted(set().union(*demands))
    subsets = [set(subset) for size in range(1, len(senders) + 1) for subset in combinations(senders, size)]
    return max(
        sum(demand for candidates, demand in demands.items() if candidates <= subset) / len(subset)
        for subset in subsets
    )


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
