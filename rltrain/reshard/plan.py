"""Plans a reshard: every rank works out its own part from the two layouts, without communication."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.models.table import Array, IntArray, TypeArray, wire_types
from rltrain.reshard.layout import BOX_FIELDS, Layout
from rltrain.reshard.match import fragments_of, num_bytes, offsets
from rltrain.reshard.senders import Dealt, Lines, Node, NodeNeeds, deal, needs_of, pieces_for

# Who sends which box to whom: every rank works it out for itself from the two layouts, without communication.

Parameters = tuple[tuple[str, tuple[int, ...]], ...]

_BOX = [(name, np.int64) for name in BOX_FIELDS]
_PLACE = ("parameter", "offset", "stride")

TRANSFER = np.dtype([("peer", np.int64), *_BOX, *((name, np.int64) for name in _PLACE)])
"""A box that goes to or comes from rank `peer`, and where it lies in this rank's parameters."""

COPY = np.dtype([*_BOX, *((f"{side}_{name}", np.int64) for side in ("source", "destination") for name in _PLACE)])
"""A box that this rank has in both layouts, and where it lies in each."""


@dataclass(frozen=True, eq=False)
class Stage:
    """What one rank sends and receives [TRANSFER], sorted by peer and box, so that both ends of a pair have the same
    boxes in the same order and the bytes between them need no description."""

    sends: Array
    receives: Array


@dataclass(frozen=True)
class Traffic:
    """Bytes of one reshard, over all ranks together.

    `local` stays on a rank and `node` goes between ranks of a node. `network_minimum` is what nodes need and do not
    hold, counted once per node: the least that can go between nodes.
    """

    local: int
    node: int
    network_minimum: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part in a reshard.

    First `direct`: from ranks that hold a box in the source layout, at places in source parameters, to places in
    destination parameters; and `copies` [COPY], which stay on the rank. Then `fan_out`: what one rank of a node has
    received for several goes to the others, at places in destination parameters on both ends. Parameters are empty
    where the rank is not in that layout. Types are per canonical tensor; on the wire of `direct` a box has the narrower
    of its two types, on that of `fan_out` the destination's.
    """

    rank: int
    source_parameters: Parameters
    destination_parameters: Parameters
    source_types: TypeArray
    destination_types: TypeArray
    copies: Array
    direct: Stage
    fan_out: Stage
    traffic: Traffic


# Plans a reshard: every rank works out its own part from the two layouts, alone and without communication.


def plan(source: Layout, destination: Layout, rank: int, ranks_per_node: int) -> RankPlan:
    """The part of `rank` alone; a Planner where several ranks' parts are wanted."""
    return Planner(source, destination, ranks_per_node).plan(rank)


def traffic(source: Layout, destination: Layout, ranks_per_node: int) -> dict[tuple[int, int], int]:
    """Bytes that go from each rank to each other one; where both are one rank, they are copied in memory."""
    planner = Planner(source, destination, ranks_per_node)
    moved: dict[tuple[int, int], int] = {}
    for rank in destination.ranks:
        made = planner.plan(rank)
        pairs = [(rank, planner.bytes_of(made.copies))]
        for boxes, types in ((made.direct.receives, planner.wire), (made.fan_out.receives, destination.types)):
            peers, index = np.unique(boxes["peer"], return_inverse=True)
            sizes = num_bytes(boxes, types)
            pairs += zip(peers.tolist(), np.bincount(index, weights=sizes).astype(np.int64).tolist(), strict=True)
        for peer, size in pairs:
            moved[peer, rank] = moved.get((peer, rank), 0) + size
    return {pair: size for pair, size in moved.items() if size}


class Planner:
    """Gives `destination` its elements from where `source` holds them, each exactly once.

    A holder on the same rank is preferred, then one on the same node. What a node does not hold enters it once, at one
    of the ranks that need it, and fans out from there. Among equally near holders bytes are balanced. Raises ValueError
    where the source lacks elements, or where its shares overlap without being equal.
    """

    def __init__(self, source: Layout, destination: Layout, ranks_per_node: int) -> None:
        if source.tensors is not destination.tensors and source.tensors != destination.tensors:
            raise ValueError("the layouts are of different models: their canonical tensors differ")
        self.source, self.destination = source, destination
        self.wire = wire_types(source.types, destination.types)
        self.ranks_per_node = ranks_per_node
        self.fragments = fragments_of(source)
        self.nodes = self._nodes()
        self.lines = Lines(list(self.nodes.values()), self.fragments, ranks_per_node)

    def plan(self, rank: int) -> RankPlan:
        """What `rank` sends, receives and copies; nothing for a rank in neither layout."""
        copies, receives, forwards, forwarded = self._at_destination(rank)
        return RankPlan(
            rank=rank,
            source_parameters=self.source.on(rank).parameters if rank in self.source.ranks else (),
            destination_parameters=self.destination.on(rank).parameters if rank in self.destination.ranks else (),
            source_types=self.source.types,
            destination_types=self.destination.types,
            copies=copies,
            direct=Stage(sends=self._from_source(rank), receives=receives),
            fan_out=Stage(sends=forwards, receives=forwarded),
            traffic=self.traffic,
        )

    @cached_property
    def traffic(self) -> Traffic:
        local = node = network = 0
        for at in self.nodes.values():
            weights = at.needs.class_weights
            blocks = self.lines.of_node[at.number]
            for number, weight in enumerate(weights.tolist()):
                local += weight * len(at.receivers(number))
            for block in blocks:
                wanted = int(sum(weights[c] * len(r) for c, r in zip(block.classes, block.receivers, strict=True)))
                local -= wanted
                network += block.length if block.enters_once else 0
                node += wanted - block.length if block.enters_once else block.length
        return Traffic(local=local, node=node, network_minimum=network)

    def bytes_of(self, boxes: Array) -> int:
        """On the wire of `direct`."""
        return int(num_bytes(boxes, self.wire).sum())

    def _nodes(self) -> dict[int, Node]:
        ranks_of: dict[int, dict[int, list[int]]] = {}
        for rank, part in sorted(zip(self.destination.ranks, self.destination.parts, strict=True)):
            ranks_of.setdefault(rank // self.ranks_per_node, {}).setdefault(part, []).append(rank)
        needs: dict[tuple[int, ...], NodeNeeds] = {}
        for parts in {tuple(sorted(held)) for held in ranks_of.values()}:
            needs[parts] = needs_of(self.destination, parts, self.fragments, self.wire)
        return {
            number: Node(number, needs[tuple(sorted(held))], {part: tuple(ranks) for part, ranks in held.items()})
            for number, held in ranks_of.items()
        }

    def _from_source(self, rank: int) -> Array:
        """The sends of stage `direct`."""
        if rank not in self.source.ranks:
            return np.empty(0, dtype=TRANSFER)
        piece_of = self._piece_of_fragment(rank)
        parts = []
        for block in self.lines.blocks_sent_by(rank):
            dealt = deal(block)
            mine = np.flatnonzero(dealt.sender == rank)
            pieces = piece_of[block.node.needs.fragment[dealt.need[mine]]]
            parts.append((dealt.boxes[mine], dealt.receiver[mine], pieces))
        return _transfers(parts, self.source.on(rank).pieces)

    def _at_destination(self, rank: int) -> tuple[Array, Array, Array, Array]:
        """(copies, receives of `direct`, sends of `fan_out`, receives of `fan_out`)."""
        nothing = np.empty(0, dtype=TRANSFER)
        if rank not in self.destination.ranks:
            return np.empty(0, dtype=COPY), nothing, nothing, nothing
        node = self.nodes[rank // self.ranks_per_node]
        part = self.destination.parts[self.destination.ranks.index(rank)]
        pieces_of_needs = pieces_for(node.needs, self.destination, part, self.fragments)
        pieces = self.destination.part(part).pieces
        receives, forwards, forwarded = [], [], []
        for block in self.lines.of_node[node.number]:
            dealt = deal(block)
            mine = np.flatnonzero(dealt.receiver == rank)
            receives.append((dealt.boxes[mine], dealt.sender[mine], pieces_of_needs[dealt.need[mine]]))
            if block.enters_once:
                for chosen, peer in _forwards(dealt, block.receivers, rank):
                    forwards.append((dealt.boxes[chosen], peer, pieces_of_needs[dealt.need[chosen]]))
                needed = np.array([rank in receivers for receivers in block.receivers], dtype=bool)
                others = np.flatnonzero((dealt.receiver != rank) & needed[dealt.needs_class])
                forwarded.append((dealt.boxes[others], dealt.receiver[others], pieces_of_needs[dealt.need[others]]))
        copies = self._copies(rank, node.needs, pieces_of_needs)
        return copies, _transfers(receives, pieces), _transfers(forwards, pieces), _transfers(forwarded, pieces)

    def _copies(self, rank: int, needs: NodeNeeds, pieces_of_needs: IntArray) -> Array:
        """[COPY] of what a rank needs and holds."""
        held = np.array([rank in holders for holders in self.fragments.holder_sets], dtype=bool)
        rows = np.flatnonzero(np.repeat(held[needs.holder_set], np.diff(needs.starts)) & (pieces_of_needs >= 0))
        result = np.empty(len(rows), dtype=COPY)
        if not len(rows):
            return result
        boxes = needs.boxes[rows]
        source_pieces = self.source.on(rank).pieces[self._piece_of_fragment(rank)[needs.fragment[rows]]]
        destination_pieces = self.destination.on(rank).pieces[pieces_of_needs[rows]]
        for name in BOX_FIELDS:
            result[name] = boxes[name]
        for side, pieces in (("source", source_pieces), ("destination", destination_pieces)):
            result[f"{side}_parameter"], result[f"{side}_stride"] = pieces["parameter"], pieces["stride"]
            result[f"{side}_offset"] = offsets(pieces, boxes)
        return result

    def _piece_of_fragment(self, rank: int) -> IntArray:
        """[fragments]: the piece in which a source rank holds each, or -1."""
        held = self.fragments.of_part[self.source.parts[self.source.ranks.index(rank)]]
        piece_of = np.full(len(self.fragments.boxes), -1, dtype=np.int64)
        piece_of[held] = np.arange(len(held))
        return piece_of


def _forwards(dealt: Dealt, receivers: tuple[IntArray, ...], rank: int) -> Iterator[tuple[IntArray, IntArray]]:
    """(boxes, peers) that `rank`, where they enter the node, sends on to each of the others that need them."""
    entered = dealt.receiver == rank
    for number, ranks in enumerate(receivers):
        chosen = np.flatnonzero(entered & (dealt.needs_class == number))
        for peer in ranks[ranks != rank]:
            yield chosen, np.full(len(chosen), peer)


def _transfers(parts: list[tuple[Array, IntArray, IntArray]], pieces: Array) -> Array:
    """[TRANSFER] of (boxes, peers, numbers of the `pieces` that hold them), in the order that both ends share."""
    if not parts:
        return np.empty(0, dtype=TRANSFER)
    boxes, peer, piece = (np.concatenate(field) for field in zip(*parts, strict=True))
    order = np.lexsort([*(boxes[name] for name in reversed(BOX_FIELDS)), peer])
    boxes, held = boxes[order], pieces[piece[order]]
    result = np.empty(len(order), dtype=TRANSFER)
    result["peer"] = peer[order]
    for name in BOX_FIELDS:
        result[name] = boxes[name]
    result["parameter"], result["stride"] = held["parameter"], held["stride"]
    result["offset"] = offsets(held, boxes)
    return result
