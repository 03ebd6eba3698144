"""What the destination ranks of one node need, as distinct boxes: each enters the node once, whoever needs it there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rltrain.models.table import Array, IntArray, TypeArray
from rltrain.reshard.layout import Layout
from rltrain.reshard.plan.match import Fragments, match, num_bytes, set_numbers


@dataclass(frozen=True, eq=False)
class Needs:
    """The boxes that some destination parts need, in classes: boxes with the same holders, needed by the same parts.

    Class c is `boxes[starts[c]:starts[c + 1]]`, in the order of places in the source's fragments (`fragment`). Its
    boxes are held by `holder_set[c]` of the fragments, needed by the parts `part_sets[part_set[c]]`, and are
    `weights` bytes each on the wire. Classes are sorted by holder set.
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
        """[classes] bytes."""
        ends: IntArray = np.concatenate([[0], np.cumsum(self.weights)])
        totals: IntArray = np.diff(ends[self.starts])
        return totals


def needs_of(layout: Layout, parts: Sequence[int], fragments: Fragments, wire: TypeArray) -> Needs:
    """What the destination `parts` (distinct) need. `wire` [tensors] is the element type that each travels in."""
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
    return Needs(
        boxes=boxes,
        fragment=fragment,
        weights=num_bytes(boxes, wire),
        starts=np.append(starts, len(boxes)),
        holder_set=classes // max(len(part_sets), 1),
        part_set=classes % max(len(part_sets), 1),
        part_sets=part_sets,
    )


def places(boxes: Array, fragment: IntArray, fragments: Fragments) -> IntArray:
    """Where each box's first element lies when the elements of all fragments are numbered through."""
    whole = fragments.boxes[fragment]
    inside = (boxes["row"] - whole["row"]) * whole["cols"] + boxes["col"] - whole["col"]
    begin: IntArray = fragments.starts[fragment] + inside
    return begin


def pieces_for(needs: Needs, layout: Layout, part: int, fragments: Fragments) -> IntArray:
    """[boxes of `needs`]: the piece of `part` in which it keeps each box, or -1 where it does not need it."""
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
    """(order, group): boxes in an order where equal ones are neighbours, and the number of each one's group there.

    A part that needs a box twice, for two of its pieces, has it in two groups.
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
    """As `_group_equal`, where boxes of different extent begin at one place or a part needs a box more than once."""
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
