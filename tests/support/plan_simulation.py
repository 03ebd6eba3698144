"""Simulates all ranks of a reshard in one process: moves boxes with numpy and compares them with the oracle."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rltrain.models import Architecture
from rltrain.reshard.layout import BOX_FIELDS, Layout, elements, hf_layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import Planner, RankPlan, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import PADDING, Place, Tensors, engine_shard, full_tensors, megatron_shard

WORLD_SIZE = 14
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Side:
    """A layout, and the expected shard of each of its ranks."""

    layout: Layout
    shards: dict[int, Tensors]


def megatron_places(grid: Grid, **settings: Any) -> dict[int, Place]:
    """Returns the places by position in the grid: tp fastest, then cp and dp, then pp.

    Experts are divided over the ranks of a stage, etp fastest.
    """
    ranks_per_stage, etp = len(grid.ranks) // grid.pp, grid.etp or grid.tp
    return {
        rank: Place(
            grid.tp,
            index % grid.tp,
            grid.pp,
            index // ranks_per_stage,
            ep=grid.ep,
            ep_rank=index % ranks_per_stage // etp % grid.ep,
            etp=etp,
            etp_rank=index % ranks_per_stage % etp,
            vpp=grid.vpp,
            layers_per_stage=grid.layers_per_stage,
            **settings,
        )
        for index, rank in enumerate(grid.ranks)
    }


def engine_places(grid: Grid) -> dict[int, Place]:
    etp = grid.tp // grid.ep
    ranks = {rank: index % grid.tp for index, rank in enumerate(grid.ranks)}
    return {
        rank: Place(grid.tp, at, ep=grid.ep, ep_rank=at // etp, etp=etp, etp_rank=at % etp)
        for rank, at in ranks.items()
    }


def side(kind: str, architecture: Architecture, grid: Grid, **settings: Any) -> Side:
    """Returns the side of a layout of kind "megatron" or "engine", else of Hugging Face's layout.

    `settings` are those of megatron_layout.
    """
    full = full_tensors(architecture)
    if kind == "megatron":
        places = megatron_places(grid, **settings)
        shards = {rank: megatron_shard(architecture, full, place) for rank, place in places.items()}
        return Side(megatron_layout(architecture, grid, **settings), shards)
    if kind == "engine":
        places = engine_places(grid)
        shards = {rank: engine_shard(architecture, full, place) for rank, place in places.items()}
        return Side(engine_layout(architecture, grid), shards)
    layout = hf_layout(architecture, grid.ranks)
    shards = {rank: {name: full[name] for name, _ in layout.on(rank).parameters} for rank in grid.ranks}
    return Side(layout, shards)


def addresses(box: np.void, prefix: str = "") -> np.ndarray:
    """Returns the element numbers of a box in its parameter, shape [rows, cols]."""
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


def simulated_rank(made: RankPlan, held: Tensors) -> Rank:
    sizes = [int(np.prod(shape)) for _, shape in made.destination_parameters]
    return Rank(
        plan=made,
        source=[held[name].reshape(-1) for name, _ in made.source_parameters],
        destination=[np.full(size, PADDING, dtype=np.float32) for size in sizes],
        written=[np.zeros(size, dtype=np.int64) for size in sizes],
    )


def execute_all(ranks: dict[int, Rank]) -> None:
    """Moves every box. A receiver sees nothing but the packed data of its senders."""
    for rank in ranks.values():
        for box in rank.plan.copies:
            rank.write(box, rank.source[box["source_parameter"]][addresses(box, "source_")], "destination_")
    for stage in ("direct", "fan_out"):
        wires: dict[tuple[int, int], list[np.ndarray]] = {}
        for number, rank in ranks.items():
            held = rank.source if stage == "direct" else rank.destination
            for box in getattr(rank.plan, stage).sends:
                wires.setdefault((number, int(box["peer"])), []).append(held[box["parameter"]][addresses(box)].copy())
        for number, rank in ranks.items():
            for box in getattr(rank.plan, stage).receives:
                values = wires[int(box["peer"]), number].pop(0)
                assert values.shape == (box["rows"], box["cols"])
                rank.write(box, values)
        assert not any(wires.values()), "every sent box is received"


def check_ends_agree(ranks: dict[int, Rank]) -> None:
    for number, rank in ranks.items():
        for stage in ("direct", "fan_out"):
            sends, receives = getattr(rank.plan, stage).sends, getattr(rank.plan, stage).receives
            assert elements(sends).all() and elements(receives).all(), "no box is empty"
            for peer in np.unique(sends["peer"]):
                sent = sends[sends["peer"] == peer]
                theirs = getattr(ranks[int(peer)].plan, stage).receives
                received = theirs[theirs["peer"] == number]
                for name in BOX_FIELDS:
                    assert np.array_equal(sent[name], received[name])
            assert number not in sends["peer"] and number not in receives["peer"]


def network_minimum(ranks: dict[int, Rank], source: Side, destination: Side, ranks_per_node: int) -> int:
    """Returns the number of elements missing on nodes, counted once per node. Every element has a different value."""
    held: dict[int, set[float]] = {}
    needed: dict[int, set[float]] = {}
    for values, side_of in ((held, source), (needed, destination)):
        for number in ranks:
            for tensor in side_of.shards.get(number, {}).values():
                values.setdefault(number // ranks_per_node, set()).update(tensor[tensor != PADDING].tolist())
    return sum(len(values - held.get(node, set())) for node, values in needed.items())


def check_totals(ranks: dict[int, Rank], moved: dict[tuple[int, int], int], ranks_per_node: int, minimum: int) -> None:
    local = sum(num_bytes for (source, destination), num_bytes in moved.items() if source == destination)
    crossing = {pair: n for pair, n in moved.items() if pair[0] // ranks_per_node != pair[1] // ranks_per_node}
    network = sum(crossing.values())
    for number, rank in ranks.items():
        sent: dict[int, int] = {}
        for boxes in (rank.plan.direct.sends, rank.plan.fan_out.sends):
            for peer, size in zip(boxes["peer"].tolist(), elements(boxes).tolist(), strict=True):
                sent[peer] = sent.get(peer, 0) + size * ELEMENT_BYTES
        assert sent == {pair[1]: n for pair, n in moved.items() if pair[0] == number != pair[1]}
        assert rank.plan.traffic.local == local
        assert rank.plan.traffic.node == sum(moved.values()) - local - network
        assert rank.plan.traffic.network_minimum == network == minimum * ELEMENT_BYTES
        for peer in np.unique(rank.plan.fan_out.sends["peer"]):
            assert peer // ranks_per_node == number // ranks_per_node, "a node fans out to its own ranks"


def reshard(source: Side, destination: Side, ranks_per_node: int) -> dict[int, Rank]:
    """Plans and executes a reshard on all ranks, and compares the results with the oracle."""
    numbers = sorted({*source.layout.ranks, *destination.layout.ranks})
    planner = Planner(source.layout, destination.layout, ranks_per_node)
    ranks = {rank: simulated_rank(planner.plan(rank), source.shards.get(rank, {})) for rank in numbers}
    check_ends_agree(ranks)
    execute_all(ranks)
    for number, rank in ranks.items():
        for index, (name, _) in enumerate(rank.plan.destination_parameters):
            expected = destination.shards[number][name].reshape(-1)
            assert np.array_equal(rank.destination[index], expected), f"{name} on rank {number}"
            assert np.array_equal(rank.written[index], (expected != PADDING).astype(np.int64)), f"{name} on {number}"
        assert len(rank.plan.destination_parameters) == len(destination.shards.get(number, {}))
    return ranks


def check_traffic(ranks: dict[int, Rank], source: Side, destination: Side, ranks_per_node: int) -> None:
    moved = traffic(source.layout, destination.layout, ranks_per_node)
    check_totals(ranks, moved, ranks_per_node, network_minimum(ranks, source, destination, ranks_per_node))
