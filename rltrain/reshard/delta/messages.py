"""The messages of a reshard that sends what changed: which elements each is packed of, and where they go.

A message begins with a header, numbers of 8 bytes: whether it is WHOLE or CHANGES, the bytes that follow, and for each
of its sections how many places and values are encoded. What follows is what was packed, or its sections as
csrc/reshard_delta.h has them, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rltrain.models.table import ITEM_BYTES, Array, IntArray
from rltrain.reshard.kernels.changes import Extent, rounded_up
from rltrain.reshard.plan.steps import Message

WHOLE, CHANGES = 1, 2

MAX_SECTIONS = 3
"""Of elements of 4, 2 and 1 bytes."""

HEADER_BYTES = 8 * (2 + 2 * MAX_SECTIONS)


@dataclass(frozen=True)
class Section:
    """Elements of one size: `elements` of `item` bytes from byte `begin` of what is packed, which are slices
    `first:last` of the table."""

    begin: int
    elements: int
    item: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.begin + self.elements * self.item


@dataclass(frozen=True)
class CodedMessage:
    """`num_bytes` are packed at byte `offset` of base number `base`, behind the header; what was sent last lies at byte
    `kept` of the stage's memory, on the sender."""

    base: int
    offset: int
    num_bytes: int
    kept: int
    sections: tuple[Section, ...]

    @property
    def first(self) -> int:
        return self.sections[0].first

    @property
    def last(self) -> int:
        return self.sections[-1].last


def coded_messages(
    rounds: Sequence[Sequence[Message]], slices: Array, types: Array, bounds: Sequence[int]
) -> list[list[CodedMessage]]:
    """Of every round, those with distinct memory, in the order of their slices: `bounds[k]:bounds[k + 1]` of the table
    `slices` [SLICE] are those of round k, `types` [slices] what each is on the wire."""
    sizes = slices["rows"] * slices["cols"] * ITEM_BYTES[types]
    found, kept = [], 0
    for number, messages in enumerate(rounds):
        first, last = bounds[number], bounds[number + 1]
        distinct = list({(message.base, message.offset): message for message in messages}.values())
        ends = np.cumsum(sizes[first:last])
        payloads = np.array([message.num_bytes - HEADER_BYTES for message in distinct], dtype=np.int64)
        lasts = first + np.searchsorted(ends, np.cumsum(payloads)) + 1
        coded = []
        for message, begin, end in zip(distinct, [first, *lasts.tolist()], lasts.tolist(), strict=False):
            sections = _sections(sizes[begin:end], ITEM_BYTES[types[begin:end]], begin)
            num_bytes = message.num_bytes - HEADER_BYTES
            assert sections[-1].end == num_bytes, "slices of a round are in the order of its messages"
            coded.append(CodedMessage(message.base, message.offset + HEADER_BYTES, num_bytes, kept, sections))
            kept += rounded_up(num_bytes)
        found.append(coded)
    return found


def _sections(sizes: IntArray, items: IntArray, first: int) -> tuple[Section, ...]:
    """Of slices of `sizes` bytes and `items` per element, of which `first` is the number of the first in the table."""
    starts = np.flatnonzero(np.diff(items, prepend=0)).tolist()
    ends = np.cumsum(sizes)
    made = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        begin, item = int(ends[start] - sizes[start]), int(items[start])
        made.append(Section(begin, (int(ends[end - 1]) - begin) // item, item, first + start, first + end))
    assert len(made) <= MAX_SECTIONS, "wide elements precede narrow ones"
    return tuple(made)


def kept_bytes(messages: Sequence[Sequence[CodedMessage]]) -> int:
    """What a sender keeps of a stage."""
    return max((made.kept + rounded_up(made.num_bytes) for coded in messages for made in coded), default=0)


def extents(message: CodedMessage, header: Sequence[int]) -> list[Extent]:
    """Of a message's sections, by the numbers of its header."""
    return [
        Extent(section.elements, section.item, header[2 + 2 * number], header[3 + 2 * number])
        for number, section in enumerate(message.sections)
    ]


def header_of(kind: int, num_bytes: int, made: Sequence[Extent]) -> list[int]:
    """The numbers of a header."""
    numbers = [kind, num_bytes, *(number for extent in made for number in (extent.places, extent.values))]
    return numbers + [0] * (HEADER_BYTES // 8 - len(numbers))
