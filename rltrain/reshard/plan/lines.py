"""How senders share out what nodes need: every demand upon the same ranks stands in one line, which is cut among them.

A line is measured in bytes. Its blocks are, node by node, what that node needs of one holder set; every candidate sends
one run of the line. A rank works out any block on its own, so sender and receiver agree without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rltrain.models.table import Array, IntArray
from rltrain.reshard.plan.balance import share_out
from rltrain.reshard.plan.match import Fragments
from rltrain.reshard.plan.needs import Needs


@dataclass(frozen=True, eq=False)
class Node:
    """A node that hosts destination ranks: `ranks_of[part]` are those with that part, ascending."""

    number: int
    needs: Needs
    ranks_of: Mapping[int, tuple[int, ...]]

    @cached_property
    def _receivers(self) -> list[IntArray]:
        sets = [sorted(rank for part in parts for rank in self.ranks_of[part]) for parts in self.needs.part_sets]
        return [np.array(ranks, dtype=np.int64) for ranks in sets]

    def receivers(self, needs_class: int) -> IntArray:
        """The ranks that need the boxes of a class, ascending."""
        return self._receivers[int(self.needs.part_set[needs_class])]


@dataclass(eq=False)
class Line:
    """`candidates` share the blocks; candidate i sends the bytes from `bounds[i]` to `bounds[i + 1]` of the line."""

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
    """What `node` needs of the boxes with one holder set, `length` bytes from `start` of `line`.

    `receivers[i]` are the ranks of the node that need class `classes[i]` and do not hold it. With `enters_once` no rank
    of the node holds the boxes: each enters the node at one of its receivers and fans out from there. Otherwise each
    receiver gets them from a holder on the node.
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
    """The boxes of a block, cut where senders or entries change.

    `need` is the number of each one's box in the node's needs; `receiver` the rank it is sent to; `needs_class` its
    place in the block's classes.
    """

    boxes: Array
    need: IntArray
    sender: IntArray
    receiver: IntArray
    needs_class: IntArray


class Lines:
    """All lines of a reshard."""

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
    """Who sends every box of a block to whom."""
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
    """(index, boxes, middle): `boxes`, which follow each other from byte `start`, cut at about `bounds`.

    Cuts fall between rows, in a box of one row between elements. `index` is the number of the box that each comes of,
    `middle` the byte in its middle.
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
