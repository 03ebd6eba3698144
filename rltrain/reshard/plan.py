"""Who sends which box to whom: every rank works it out for itself from the two layouts, without communication."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.reshard.balance import choose_sources
from rltrain.reshard.layout import BOX_FIELDS, Array, IntArray, Layout
from rltrain.reshard.match import Pieces, elements, fragments_of, match, offsets

Parameters = tuple[tuple[str, tuple[int, ...]], ...]

_BOX = [(name, np.int64) for name in BOX_FIELDS]
_PLACE = ("parameter", "offset", "stride")

TRANSFER = np.dtype([("peer", np.int64), *_BOX, *((name, np.int64) for name in _PLACE)])
"""A box that goes to or comes from rank `peer`, and where it lies in this rank's parameters."""

COPY = np.dtype([*_BOX, *((f"{side}_{name}", np.int64) for side in ("source", "destination") for name in _PLACE)])
"""A box that this rank has in both layouts, and where it lies in each."""

ORDER = ("peer", *BOX_FIELDS)
"""Both ends of a pair sort their boxes by this, so that the bytes between them need no description."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part in a reshard.

    `sends` and `receives` [TRANSFER] are in `ORDER`; `copies` [COPY] stay on the rank. Parameters are empty where the
    rank is not in that layout. `max_peers` is the most ranks that any rank sends to or receives from. The totals count
    elements over all ranks.
    """

    rank: int
    source_parameters: Parameters
    destination_parameters: Parameters
    sends: Array
    receives: Array
    copies: Array
    max_peers: int
    total_wire_elements: int
    total_local_elements: int


def plan(source: Layout, destination: Layout, rank: int, ranks_per_node: int) -> RankPlan:
    """The part of `rank` in giving `destination` its elements from where `source` holds them, each exactly once.

    A holder on the same rank is preferred, then one on the same node; among equals, bytes are balanced. Raises
    ValueError where the source lacks elements, or where its shares overlap without being equal.
    """
    moves = _Moves(source, destination, ranks_per_node)
    sent, received = moves.source_rank == rank, moves.destination_rank == rank
    outgoing, incoming = np.flatnonzero(sent & ~received), np.flatnonzero(received & ~sent)
    wire = moves.source_rank != moves.destination_rank
    return RankPlan(
        rank=rank,
        source_parameters=source.on(rank).parameters if rank in source.ranks else (),
        destination_parameters=destination.on(rank).parameters if rank in destination.ranks else (),
        sends=moves.transfers(outgoing, moves.destination_rank, "source"),
        receives=moves.transfers(incoming, moves.source_rank, "destination"),
        copies=moves.copies(np.flatnonzero(sent & received)),
        max_peers=moves.max_peers(),
        total_wire_elements=int(moves.elements[wire].sum()),
        total_local_elements=int(moves.elements[~wire].sum()),
    )


def traffic(source: Layout, destination: Layout, ranks_per_node: int, element_bytes: int) -> dict[tuple[int, int], int]:
    """Bytes that go from each source rank to each destination rank; where both are one rank, it copies in memory."""
    pairs, num_elements = _Moves(source, destination, ranks_per_node).pairs
    return {(int(s), int(d)): int(n) * element_bytes for (s, d), n in zip(pairs, num_elements, strict=True)}


class _Moves:
    """Every move of the whole job, as arrays with one entry per box and destination rank."""

    def __init__(self, source: Layout, destination: Layout, ranks_per_node: int) -> None:
        if source.tensors != destination.tensors:
            raise ValueError("the layouts are of different models: their canonical tensors differ")
        self._fragments = fragments_of(source)
        self._destination = Pieces.of(destination)
        self._found = match(self._destination.pieces, self._fragments, destination.tensors)
        self._index, self.destination_rank = self._replicate(destination)
        self.elements = elements(self._found.boxes)[self._index]
        order = np.argsort(source.ranks)
        self._source_ranks = np.array(source.ranks, dtype=np.int64)[order]
        self._part_of_source = np.searchsorted(self._fragments.source.part_numbers, source.parts)[order]
        self.source_rank = choose_sources(
            holds=self._fragments.held[:, self._part_of_source] >= 0,
            fragment=self._found.fragment[self._index],
            weight=self.elements,
            destination=self.destination_rank,
            ranks=self._source_ranks,
            ranks_per_node=ranks_per_node,
        )

    def _replicate(self, destination: Layout) -> tuple[IntArray, IntArray]:
        """(overlap, destination rank) of every move: a part's overlaps once per rank that holds the part."""
        starts = np.searchsorted(self._found.piece, self._destination.starts)
        indices, ranks = [], []
        for rank, part in sorted(zip(destination.ranks, destination.parts, strict=True)):
            place = np.searchsorted(self._destination.part_numbers, part)
            indices.append(np.arange(starts[place], starts[place + 1]))
            ranks.append(np.full(len(indices[-1]), rank, dtype=np.int64))
        return np.concatenate(indices), np.concatenate(ranks)

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray]:
        """([pairs, 2] source and destination rank, [pairs] elements)."""
        both = np.stack([self.source_rank, self.destination_rank], axis=1)
        pairs, inverse = np.unique(both, axis=0, return_inverse=True)
        totals = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(totals, inverse.reshape(-1), self.elements)
        return pairs, totals

    def max_peers(self) -> int:
        pairs, _ = self.pairs
        crossing = pairs[pairs[:, 0] != pairs[:, 1]]
        return int(max((np.unique(side, return_counts=True)[1].max(initial=0) for side in crossing.T), default=0))

    def transfers(self, moves: IntArray, peer: IntArray, side: str) -> Array:
        """[TRANSFER] of `moves` as the rank on `side` sees them."""
        result = np.empty(len(moves), dtype=TRANSFER)
        result["peer"] = peer[moves]
        self._fill(result, moves, side, prefix="")
        return np.sort(result, order=ORDER)

    def copies(self, moves: IntArray) -> Array:
        result = np.empty(len(moves), dtype=COPY)
        for side in ("source", "destination"):
            self._fill(result, moves, side, prefix=f"{side}_")
        return np.sort(result, order=BOX_FIELDS)

    def _fill(self, result: Array, moves: IntArray, side: str, prefix: str) -> None:
        index = self._index[moves]
        boxes = self._found.boxes[index]
        if side == "source":
            place = np.searchsorted(self._source_ranks, self.source_rank[moves])
            held = self._fragments.held[self._found.fragment[index], self._part_of_source[place]]
            pieces = self._fragments.source.pieces[held]
        else:
            pieces = self._destination.pieces[self._found.piece[index]]
        for name in BOX_FIELDS:
            result[name] = boxes[name]
        result[f"{prefix}parameter"], result[f"{prefix}stride"] = pieces["parameter"], pieces["stride"]
        result[f"{prefix}offset"] = offsets(pieces, boxes)
