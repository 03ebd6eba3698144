"""Plans a reshard. Every rank computes its own part from the two layouts, without communication."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rltrain.models.table import Array, IntArray, TypeArray, wire_types
from rltrain.reshard.layout import (
    BOX_FIELDS,
    Fragments,
    Layout,
    Parameters,
    fragments_of,
    match,
    num_bytes,
    offsets,
    set_numbers,
)

# Lines of demands. All demands on the same candidate ranks form one line, to be cut among the candidates.
#
# A line is measured in bytes. Each block of it has the boxes of one holder set needed by one node. Every candidate
# sends one run of the line. Any rank can compute any block, so sender and receiver agree without communication.

# Distribution of demands over the ranks able to meet them. The busiest rank should send as little as possible.
#
# All arithmetic is in integers, because every rank must get the same result on any processor.

MAX_SWEEPS = 300
TOLERANCE = 2000
"""Sweeps end if no quota moves by more than the total demand divided by this and by the number of ranks."""


def share_out(candidates: Sequence[IntArray], demands: Sequence[int]) -> list[IntArray]:
    """Splits every demand over its candidates. Returns one array of quotas per demand, with the demand as its sum.

    `candidates[i]` has the distinct ranks able to meet `demands[i]`. Each demand in turn is poured over its candidates
    like water over uneven ground, on top of the load of the other demands. This repeats until the quotas settle. It is
    block coordinate descent on the sum of squared loads. The sum is convex, so the result approaches the split with the
    smallest maximum load.
    """
    num_ranks = 1 + max((int(ranks.max()) for ranks in candidates), default=-1)
    load = np.zeros(num_ranks, dtype=np.int64)
    quotas = [np.zeros(len(ranks), dtype=np.int64) for ranks in candidates]
    for number, (ranks, demand) in enumerate(zip(candidates, demands, strict=True)):
        if len(ranks) == 1:
            quotas[number][0] = demand
            load[ranks] += demand
    shared = [number for number, ranks in enumerate(candidates) if len(ranks) > 1]
    tolerance = sum(demands) // (TOLERANCE * max(num_ranks, 1))
    for _ in range(MAX_SWEEPS):
        moved = 0
        for number in shared:
            ranks = candidates[number]
            load[ranks] -= quotas[number]
            quota = pour(load[ranks], demands[number])
            moved = max(moved, int(np.abs(quota - quotas[number]).max()))
            quotas[number] = quota
            load[ranks] += quota
        if moved <= tolerance:
            break
    return quotas


def pour(load: IntArray, amount: int) -> IntArray:
    """Returns the share of each vessel if `amount` is poured into vessels already holding `load`. The lowest vessels
    are filled to one level."""
    ascending = np.sort(load)
    held = np.cumsum(ascending)
    # With the k lowest vessels filled to one level, the next vessel must not be below the level.
    levels = (held + amount) // np.arange(1, len(load) + 1)
    above = np.append(ascending[1:], np.iinfo(np.int64).max)
    level = levels[np.argmax(levels <= above)]
    quota: IntArray = np.maximum(level - load, 0)
    left_over = amount - int(quota.sum())
    lowest = np.argsort(load + quota, kind="stable")[:left_over]
    quota[lowest] += 1
    return quota


# The needs of one node's destination ranks, as distinct boxes. Each box enters the node once, even if several ranks
# need it.


@dataclass(frozen=True, eq=False)
class NodeNeeds:
    """The boxes needed by some destination parts, grouped in classes. The boxes of a class have the same holders and
    are needed by the same parts.

    Class c is `boxes[starts[c]:starts[c + 1]]`, in the order of positions in the source's fragments (`fragment`). Its
    boxes are held by `holder_set[c]` of the fragments and needed by the parts `part_sets[part_set[c]]`. `weights` are
    the bytes of each box on the wire. Classes are sorted by holder set.
    """

    boxes: Array
    fragment: IntArray
    weights: IntArray
    starts: IntArray
    holder_set: IntArray
    part_set: IntArray
    part_sets: list[tuple[int, ...]]

    def classes_held_by(self, holder_set: int) -> range:
        first, last = np.searchsorted(self.holder_set, [holder_set, holder_set + 1])
        return range(int(first), int(last))

    @cached_property
    def class_weights(self) -> IntArray:
        """Bytes of each class, shape [classes]."""
        ends: IntArray = np.concatenate([[0], np.cumsum(self.weights)])
        totals: IntArray = np.diff(ends[self.starts])
        return totals


def needs_of(layout: Layout, parts: Sequence[int], fragments: Fragments, wire: TypeArray) -> NodeNeeds:
    """Returns the needs of the destination `parts`. These must be distinct. `wire` [tensors] has the element type of
    each tensor on the wire."""
    found = [match(layout.part(part).pieces, fragments, layout.tensors) for part in parts]
    boxes = np.concatenate([overlap.boxes for overlap in found])
    fragment = np.concatenate([overlap.fragment for overlap in found])
    part = np.repeat(np.array(parts, dtype=np.int64), [len(overlap.boxes) for overlap in found])
    place = places(boxes, fragment, fragments)
    order, group = _group_equal(boxes, place, part)
    part_set, part_sets = set_numbers(part[order], group, int(group[-1]) + 1 if len(group) else 0)
    first = order[np.flatnonzero(np.diff(group, prepend=-1))]
    boxes, fragment = boxes[first], fragment[first]
    key = fragments.holders[fragment] * len(part_sets) + part_set
    order = np.argsort(key, kind="stable")
    boxes, fragment, key = boxes[order], fragment[order], key[order]
    classes, starts = np.unique(key, return_index=True)
    return NodeNeeds(
        boxes=boxes,
        fragment=fragment,
        weights=num_bytes(boxes, wire),
        starts=np.append(starts, len(boxes)),
        holder_set=classes // max(len(part_sets), 1),
        part_set=classes % max(len(part_sets), 1),
        part_sets=part_sets,
    )


def places(boxes: Array, fragment: IntArray, fragments: Fragments) -> IntArray:
    """Returns the number of each box's first element. Elements of all fragments are numbered consecutively."""
    whole = fragments.boxes[fragment]
    inside = (boxes["row"] - whole["row"]) * whole["cols"] + boxes["col"] - whole["col"]
    begin: IntArray = fragments.starts[fragment] + inside
    return begin


def pieces_for(needs: NodeNeeds, layout: Layout, part: int, fragments: Fragments) -> IntArray:
    """Returns the piece of `part` for each box of `needs`, shape [boxes], or -1 if `part` does not need the box."""
    found = match(layout.part(part).pieces, fragments, layout.tensors)
    involved = np.array([part in members for members in needs.part_sets], dtype=bool)
    rows = np.flatnonzero(np.repeat(involved[needs.part_set], np.diff(needs.starts)))
    pieces = np.full(len(needs.boxes), -1, dtype=np.int64)
    pieces[rows[_by_place(needs.boxes[rows], needs.fragment[rows], fragments)]] = found.piece[
        _by_place(found.boxes, found.fragment, fragments)
    ]
    return pieces


def _by_place(boxes: Array, fragment: IntArray, fragments: Fragments) -> IntArray:
    return np.lexsort((boxes["cols"], boxes["rows"], places(boxes, fragment, fragments)))


def _group_equal(boxes: Array, place: IntArray, part: IntArray) -> tuple[IntArray, IntArray]:
    """Returns (order, group). Equal boxes are neighbours in `order`, and `group` numbers the groups of equal boxes
    there.

    If a part needs a box twice, for two of its pieces, the box is in two groups.
    """
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    same = ordered[1:] == ordered[:-1]
    extents = [boxes[name][order] for name in ("rows", "cols")]
    regular = all(np.array_equal(extent[1:][same], extent[:-1][same]) for extent in extents)
    twice = same & (part[order][1:] == part[order][:-1])
    if regular and not twice.any():
        return order, np.concatenate([[0], np.cumsum(~same)])[: len(order)]
    return _group_unusual(boxes, place, part)


def _group_unusual(boxes: Array, place: IntArray, part: IntArray) -> tuple[IntArray, IntArray]:
    """Does the work of `_group_equal` if boxes of different extent begin at one place, or if a part needs a box more
    than once."""
    fields = [place, boxes["rows"], boxes["cols"], part]
    order = np.lexsort(fields[::-1])
    changes = [np.diff(field[order], prepend=-1) != 0 for field in fields]
    begins = np.flatnonzero(changes[0] | changes[1] | changes[2] | changes[3])
    counts = np.diff(np.append(begins, len(order)))
    repeat = np.empty(len(order), dtype=np.int64)
    repeat[order] = np.arange(len(order)) - np.repeat(begins, counts)
    fields = [place, boxes["rows"], boxes["cols"], repeat, part]
    order = np.lexsort(fields[::-1])
    changed = np.any([np.diff(field[order], prepend=-1) != 0 for field in fields[:-1]], axis=0)
    return order, np.cumsum(changed) - 1


@dataclass(frozen=True, eq=False)
class Node:
    """A node with destination ranks. `ranks_of[part]` has the ranks with this part, ascending."""

    number: int
    needs: NodeNeeds
    ranks_of: Mapping[int, tuple[int, ...]]

    @cached_property
    def _receivers(self) -> list[IntArray]:
        sets = [sorted(rank for part in parts for rank in self.ranks_of[part]) for parts in self.needs.part_sets]
        return [np.array(ranks, dtype=np.int64) for ranks in sets]

    def receivers(self, needs_class: int) -> IntArray:
        """Returns the ranks in need of the boxes of a class, ascending."""
        return self._receivers[int(self.needs.part_set[needs_class])]


@dataclass(eq=False)
class Line:
    """The demands on one set of candidates, in bytes. Candidate i sends the bytes from `bounds[i]` to `bounds[i +
    1]`."""

    candidates: IntArray
    length: int = 0
    blocks: list["Block"] = field(default_factory=list)
    bounds: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, block: "Block") -> None:
        self.blocks.append(block)
        self.length += block.length

    def blocks_sent_by(self, rank: int) -> list["Block"]:
        place = int(np.searchsorted(self.candidates, rank))
        if place == len(self.candidates) or self.candidates[place] != rank:
            return []
        start, stop = self.bounds[place], self.bounds[place + 1]
        return [block for block in self.blocks if block.start < stop and start < block.start + block.length]


@dataclass(frozen=True, eq=False)
class Block:
    """The boxes of one holder set needed by `node`. They are `length` bytes of `line`, from byte `start` on.

    `receivers[i]` has the ranks of the node in need of class `classes[i]` without holding it. If `enters_once`, no rank
    of the node holds the boxes. Each box then enters the node at one of its receivers and fans out from there.
    Otherwise each receiver gets the boxes from a holder on the node.
    """

    line: Line
    start: int
    length: int
    node: Node
    classes: tuple[int, ...]
    receivers: tuple[IntArray, ...]
    enters_once: bool


@dataclass(frozen=True, eq=False)
class Dealt:
    """The boxes of a block, cut at every change of sender or entry rank.

    `need` is the number of each box in the node's needs. `sender` and `receiver` are ranks. `needs_class` is an index
    into the block's classes.
    """

    boxes: Array
    need: IntArray
    sender: IntArray
    receiver: IntArray
    needs_class: IntArray


class Lines:
    """The lines of a reshard, and their blocks by node."""

    def __init__(self, nodes: list[Node], fragments: Fragments, ranks_per_node: int) -> None:
        self.all: dict[tuple[int, ...], Line] = {}
        self.of_node: dict[int, list[Block]] = {node.number: [] for node in nodes}
        self._ranks_per_node = ranks_per_node
        for node in nodes:
            for number in np.unique(node.needs.holder_set):
                self._demand(node, int(number), fragments.holder_sets[number])
        lines = list(self.all.values())
        for line, quotas in zip(
            lines, share_out([line.candidates for line in lines], [line.length for line in lines]), strict=True
        ):
            line.bounds = np.concatenate([[0], np.cumsum(quotas)])

    def blocks_sent_by(self, rank: int) -> list[Block]:
        return [block for line in self.all.values() for block in line.blocks_sent_by(rank)]

    def _demand(self, node: Node, number: int, holders: IntArray) -> None:
        first = node.number * self._ranks_per_node
        here = holders[np.searchsorted(holders, first) : np.searchsorted(holders, first + self._ranks_per_node)]
        classes, receivers = [], []
        for needs_class in node.needs.classes_held_by(number):
            ranks = node.receivers(needs_class)
            ranks = ranks[~np.isin(ranks, here)] if len(here) else ranks
            if len(ranks):
                classes.append(needs_class)
                receivers.append(ranks)
        if not classes:
            return
        enters_once = len(here) == 0
        copies = [1 if enters_once else len(ranks) for ranks in receivers]
        length = int((node.needs.class_weights[classes] * copies).sum())
        candidates = holders if enters_once else here
        line = self.all.setdefault(tuple(candidates.tolist()), Line(candidates))
        block = Block(line, line.length, length, node, tuple(classes), tuple(receivers), enters_once)
        line.add(block)
        self.of_node[node.number].append(block)


def deal(block: Block) -> Dealt:
    """Returns the boxes of a block with the sender and the receiver of each."""
    needs = block.node.needs
    rows, place, target, entries, entry_bounds = [], [], [], [], []
    start = block.start
    for i, (number, receivers) in enumerate(zip(block.classes, block.receivers, strict=True)):
        class_rows = np.arange(needs.starts[number], needs.starts[number + 1])
        weight = int(needs.class_weights[number])
        if block.enters_once:
            rows.append(class_rows)
            shares = np.arange(1, len(receivers) + 1)
            entries.append(receivers)
            entry_bounds.append(start + weight * shares // len(receivers))
            start += weight
        else:
            rows.append(np.tile(class_rows, len(receivers)))
            target.append(np.repeat(receivers, len(class_rows)))
            start += weight * len(receivers)
        place.append(np.full(len(rows[-1]), i))
    need = np.concatenate(rows)
    bounds = np.concatenate([block.line.bounds[1:-1], *entry_bounds])
    index, boxes, middle = _cut(needs.boxes[need], needs.weights[need], block.start, bounds)
    sender = block.line.candidates[np.searchsorted(block.line.bounds[1:-1], middle, side="right")]
    if block.enters_once:
        receiver = np.concatenate(entries)[np.searchsorted(np.concatenate(entry_bounds)[:-1], middle, side="right")]
    else:
        receiver = np.concatenate(target)[index]
    return Dealt(boxes, need[index], sender, receiver, np.concatenate(place)[index])


def _cut(boxes: Array, weights: IntArray, start: int, bounds: IntArray) -> tuple[IntArray, Array, IntArray]:
    """Cuts consecutive `boxes`, beginning at byte `start`, at about the bytes `bounds`. Returns (index, boxes, middle).

    Cuts are between rows, or between elements in a box of one row. `index` is the number of each result's original box.
    `middle` is the byte in the middle of each result.
    """
    ends = start + np.cumsum(weights)
    begins = ends - weights
    bounds = np.unique(bounds[(bounds > start) & (bounds < ends[-1])])
    unit = np.where(boxes["rows"] > 1, weights // boxes["rows"], weights // boxes["cols"])
    hit = np.searchsorted(begins, bounds, side="right") - 1
    cuts = begins[hit] + (bounds - begins[hit]) // unit[hit] * unit[hit]
    inside = (cuts > begins[hit]) & (cuts < ends[hit])
    cuts, first = np.unique(cuts[inside], return_index=True)
    after = hit[inside][first] + 1
    index = np.insert(np.arange(len(boxes)), after, after - 1)
    low, high = np.insert(begins, after, cuts), np.insert(ends, after - 1, cuts)
    parts = boxes[index]
    skip, count = (low - begins[index]) // unit[index], (high - low) // unit[index]
    by_rows = parts["rows"] > 1
    parts["row"] += np.where(by_rows, skip, 0)
    parts["col"] += np.where(by_rows, 0, skip)
    parts["rows"] = np.where(by_rows, count, parts["rows"])
    parts["cols"] = np.where(by_rows, parts["cols"], count)
    return index, parts, (low + high) // 2


# The sends, receives and copies of one rank.

_BOX = [(name, np.int64) for name in BOX_FIELDS]
_PLACE = ("parameter", "offset", "stride")

TRANSFER = np.dtype([("peer", np.int64), *_BOX, *((name, np.int64) for name in _PLACE)])
"""A box sent to or received from rank `peer`, and its position in this rank's parameters."""

COPY = np.dtype([*_BOX, *((f"{side}_{name}", np.int64) for side in ("source", "destination") for name in _PLACE)])
"""A box present on this rank in both layouts, and its position in each."""


@dataclass(frozen=True, eq=False)
class Stage:
    """The boxes [TRANSFER] sent and received by one rank.

    Both arrays are sorted by peer and box. So both ends of a pair have the same boxes in the same order, and messages
    need no description.
    """

    sends: Array
    receives: Array


@dataclass(frozen=True)
class Traffic:
    """The bytes of one reshard, summed over all ranks.

    `local` bytes stay on a rank. `node` bytes go between ranks of a node. `network_minimum` is the least possible
    traffic between nodes. It counts the bytes needed but not held by a node, once per node.
    """

    local: int
    node: int
    network_minimum: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part in a reshard.

    In stage `direct`, boxes go from source parameters of their holders to destination parameters. The boxes in `copies`
    [COPY] stay on the rank. In stage `fan_out`, ranks forward received boxes to other ranks of their node. These boxes
    are in destination parameters on both ends.

    Parameters are empty if the rank is not in the layout. Types are per canonical tensor. In `direct` a box travels in
    the narrower of its two types, and in `fan_out` in the destination's type.
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


# The planner.


def plan(source: Layout, destination: Layout, rank: int, ranks_per_node: int) -> RankPlan:
    """Returns the plan of `rank`. For the plans of several ranks, make a Planner."""
    return Planner(source, destination, ranks_per_node).plan(rank)


def traffic(source: Layout, destination: Layout, ranks_per_node: int) -> dict[tuple[int, int], int]:
    """Returns the bytes from each rank to each other rank, by (sender, receiver). Bytes copied within a rank have the
    key (rank, rank)."""
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
    """A planner of a reshard. `destination` gets every element exactly once from its holders in `source`.

    A holder on the same rank is preferred, then one on the same node. Elements missing on a node enter it once, at one
    of the ranks in need, and fan out from there. Bytes are balanced among equally near holders. Raises ValueError if
    the source lacks elements, if its shares overlap without being equal, or if the layouts have different canonical
    tensors.
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
        """Returns the sends, receives and copies of `rank`. They are empty for a rank outside both layouts."""
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
        """Returns the bytes of `boxes` on the wire of stage `direct`."""
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
        """Returns the sends of stage `direct`."""
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
        """Returns (copies, receives of `direct`, sends of `fan_out`, receives of `fan_out`)."""
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
        """Returns the boxes [COPY] both needed and held by a rank."""
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
        """Returns the piece of each fragment on a source rank, shape [fragments], or -1 if the rank does not hold the
        fragment."""
        held = self.fragments.of_part[self.source.parts[self.source.ranks.index(rank)]]
        piece_of = np.full(len(self.fragments.boxes), -1, dtype=np.int64)
        piece_of[held] = np.arange(len(held))
        return piece_of


def _forwards(dealt: Dealt, receivers: tuple[IntArray, ...], rank: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields (boxes, peers) for every other rank in need of boxes entering the node at `rank`."""
    entered = dealt.receiver == rank
    for number, ranks in enumerate(receivers):
        chosen = np.flatnonzero(entered & (dealt.needs_class == number))
        for peer in ranks[ranks != rank]:
            yield chosen, np.full(len(chosen), peer)


def _transfers(parts: list[tuple[Array, IntArray, IntArray]], pieces: Array) -> Array:
    """Returns transfers [TRANSFER] in the order shared by both ends. `parts` has (boxes, peers, numbers of their
    `pieces`)."""
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
