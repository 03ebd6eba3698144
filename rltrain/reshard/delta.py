"""Sends what changed: between pack and wire, and between wire and unpack; the messages for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import ITEM_BYTES, Array, IntArray
from rltrain.reshard.changes import Extent, Packing, changes_on, mark, rounded_up
from rltrain.reshard.copies import Message, StageSteps, Steps
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.rounds import STAGES, Headers
from rltrain.reshard.wires import Memory, byte_buffer

# Which of the syncs of a destination send everything, and which what changed.

DENSE_SHARE = 0.9
"""Of the bytes that were compared: where as much is sent, comparing them has saved nothing."""

FIRST_REST, LONGEST_REST = 4, 64
"""Syncs that send everything and remember nothing, once remembering was in vain: each time twice as many."""


class DeltaTurn(Enum):
    """PLAIN sends everything and remembers nothing of it, WHOLE sends and remembers everything."""

    PLAIN = "plain"
    WHOLE = "whole"
    CHANGES = "changes"


@dataclass
class DeltaTurns:
    """The same on all ranks that join the syncs.

    `full_every`: syncs from one that sends everything to the next. Every `check_every`-th sync of changes is compared
    with its source (0: none), the first of all is, and behind one that differed all are.
    """

    full_every: int
    check_every: int = 0
    compares: bool = field(default=False, init=False)
    """Whether both sides are to be compared behind the present sync."""
    _remembers: bool = field(default=False, init=False)
    _since_full: int = field(default=0, init=False)
    _num_changes: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)
    """Syncs that are still to send everything, uncompared."""
    _last_rest: int = field(default=0, init=False)
    _trusted: bool = field(default=True, init=False)

    def next(self, *, lost: bool) -> DeltaTurn:
        """A sync begins; `lost`: some rank's destination is not what the last one left. `finished` follows, unless it
        failed."""
        if lost and self._remembers and not self._since_full:
            self._give_up()
        turn = self._turn(lost)
        self._remembers, self.compares = False, False
        if turn is DeltaTurn.CHANGES:
            due = self.check_every and (self._num_changes + 1) % self.check_every == 0
            self.compares = bool(due) or self._num_changes == 0 or not self._trusted
            self._num_changes += 1
        return turn

    def finished(self, turn: DeltaTurn, sent_share: float = 0.0) -> None:
        """`sent_share`: of the bytes that a sync of changes compared, what it sent; 1 where it compared none."""
        self._remembers = turn is not DeltaTurn.PLAIN
        self._since_full = self._since_full + 1 if turn is DeltaTurn.CHANGES else 0
        self._rest -= turn is DeltaTurn.PLAIN
        if turn is not DeltaTurn.CHANGES:
            return
        if sent_share >= DENSE_SHARE:
            self._give_up()
        else:
            self._last_rest = 0

    def differed(self) -> None:
        """What a sync of changes left differs from its source."""
        self._trusted = False

    def _give_up(self) -> None:
        """Remembering was in vain: for some syncs, each time twice as many, everything is sent as without it."""
        self._rest = self._last_rest = min(max(2 * self._last_rest, FIRST_REST), LONGEST_REST)

    def _turn(self, lost: bool) -> DeltaTurn:
        if self._rest > 0:
            return DeltaTurn.PLAIN
        due = self._since_full + 1 >= self.full_every
        return DeltaTurn.WHOLE if lost or due or not self._remembers else DeltaTurn.CHANGES


# The messages of a reshard that sends what changed: which elements each is packed of, and where they go.
#
# A message begins with a header, numbers of 8 bytes: whether it is WHOLE or CHANGES, the bytes that follow, and for
# each of its sections how many places and values are encoded. What follows is what was packed, or its sections as
# csrc/reshard_delta.h has them, one after another.

WHOLE, CHANGES = 1, 2

MAX_SECTIONS = 3
"""Of elements of 4, 2 and 1 bytes."""

HEADER_BYTES = 8 * (2 + 2 * MAX_SECTIONS)


@dataclass(frozen=True)
class DeltaSection:
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
    sections: tuple[DeltaSection, ...]

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


def _sections(sizes: IntArray, items: IntArray, first: int) -> tuple[DeltaSection, ...]:
    """Of slices of `sizes` bytes and `items` per element, of which `first` is the number of the first in the table."""
    starts = np.flatnonzero(np.diff(items, prepend=0)).tolist()
    ends = np.cumsum(sizes)
    made = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        begin, item = int(ends[start] - sizes[start]), int(items[start])
        made.append(DeltaSection(begin, (int(ends[end - 1]) - begin) // item, item, first + start, first + end))
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


# Between pack and wire: what changed since it was sent last; and between wire and unpack: it is put in its places.


@dataclass(frozen=True)
class DeltaSettings:
    """`keep_on`: where senders keep what they sent; `in_shared_memory`: what passes through it is compared as well."""

    keep_on: Literal["device", "host"] = "device"
    in_shared_memory: bool = False


def headers_of(settings: DeltaSettings) -> Headers:
    """Of the stages whose messages are compared."""
    return tuple(HEADER_BYTES * (settings.in_shared_memory or not kind.shared) for kind in STAGES)


@dataclass
class DeltaCount:
    """Of one run on this rank: `compared` bytes that it packed, of which `changed` differed, and what it `sent` for
    them; `received` bytes."""

    compared: int = 0
    changed: int = 0
    sent: int = 0
    received: int = 0


class Coder:
    """What one rank of a reshard remembers of its last run, by messages of `steps`, which have headers.

    On the sender it is all bytes that were packed, on the receiver the destination itself, which nobody else writes to.
    """

    def __init__(self, steps: Steps, device: torch.device, settings: DeltaSettings) -> None:
        self._settings, self._device, self._slices = settings, device, steps.slices
        types = steps.slices["dst_type"], steps.slices["src_type"]
        stages = [stage for stage in steps.stages if stage.header_bytes]
        self._sent = [coded_messages(stage.sends, steps.slices, types[0], stage.pack) for stage in stages]
        self._received = [coded_messages(stage.receives, steps.slices, types[1], stage.unpack) for stage in stages]
        self._stages = {stage.kind: number for number, stage in enumerate(stages)}
        self._changes = changes_on(device)
        self._kept: list[Tensor] = []
        self.scratch_bytes = max(stage.send_bytes for stage in stages)
        self._remembers = False
        self._lengths: dict[tuple[int, int], int] = {}
        self._memory: Memory | None = None
        self._table: CopyTable | None = None
        self.scratch = torch.empty(0, dtype=torch.uint8)
        """What rounds are packed into that are compared; the others into what wires send from."""
        self.whole = True
        """Whether the run sends everything."""
        self.count = DeltaCount()

    @property
    def kept_bytes(self) -> int:
        """What this rank keeps of all that it sends."""
        return sum(kept_bytes(messages) for messages in self._sent)

    def begin(self, *, whole: bool) -> None:
        """A run that sends all where `whole`. SyncError where it is to send what changed since one that failed."""
        if not (whole or self._remembers):
            raise SyncError("a reshard is to send what changed, but the run before it did not come to its end")
        self.whole, self._remembers, self.count = whole, False, DeltaCount()
        if not self._kept:
            on_host = self._settings.keep_on == "host"
            self._kept = [byte_buffer(kept_bytes(sent), self._device, host=on_host) for sent in self._sent]
        self.scratch = byte_buffer(0 if whole else self.scratch_bytes, self._device, host=False)

    def use(self, memory: Memory, table: CopyTable) -> None:
        """`memory` is what wires send from and receive into; `table` packs, into `scratch` unless all is sent."""
        self._memory, self._table = memory, table

    def finish(self) -> None:
        """All ranks are through, as far as this one."""
        self._remembers = True
        self.release()

    def release(self) -> None:
        """Let go of what a run was given."""
        self._memory = self._table = None
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def encode(self, steps: StageSteps, number: int) -> None:
        """Pack a round into the messages that leave, which of what changed have no more."""
        assert self._table is not None, "begin and use come first"
        stage = self._stages[steps.kind]
        if self.whole or not self._changes.packs:
            self._table.launch(steps.pack[number], steps.pack[number + 1])
        for message in self._sent[stage][number]:
            self._lengths[message.base, message.offset] = HEADER_BYTES + self._encode(message, self._kept[stage])

    def shortened(self, message: Message) -> Message:
        """A message of the round that was encoded last, as long as it is."""
        return message._replace(num_bytes=self._lengths[message.base, message.offset + HEADER_BYTES])

    def decode(self, steps: StageSteps, number: int) -> None:
        """Put what arrived in a round where it goes."""
        for message in self._received[self._stages[steps.kind]][number]:
            self._decode(message)

    def _encode(self, message: CodedMessage, all_kept: Tensor) -> int:
        """Bytes behind the header."""
        assert self._memory is not None, "begin and use come first"
        size, out = message.num_bytes, self._memory.bytes(message.base)
        remembered = all_kept[message.kept : message.kept + size]
        payload = out[message.offset : message.offset + size]
        kept = remembered.to(self.scratch.device)
        made = None
        if self.whole:
            kept.copy_(payload)
        else:
            made = self._changes_of(message, kept, payload)
        if kept.data_ptr() != remembered.data_ptr():
            remembered.copy_(kept)
        length = size if made is None else sum(extent.num_bytes for extent in made)
        if not self.whole:
            self.count.compared += size
            self.count.sent += length
        header = header_of(WHOLE if made is None else CHANGES, length, made or ())
        out[message.offset - HEADER_BYTES : message.offset].view(torch.int64).copy_(torch.tensor(header))
        return length

    def _changes_of(self, message: CodedMessage, kept: Tensor, payload: Tensor) -> list[Extent] | None:
        """Written to `payload`; None where they take more than the whole message, which it then has. In either case
        `kept` becomes what is packed."""
        packed = self.scratch[message.offset : message.offset + message.num_bytes]
        parts = [slice(section.begin, section.end) for section in message.sections]
        marks = [
            mark(self._changes, packed[part], kept[part], section.item, self._packing(message, section))
            for part, section in zip(parts, message.sections, strict=True)
        ]
        self.count.changed += sum(found.changed * found.extent.item for found in marks)
        if sum(found.extent.num_bytes for found in marks) >= message.num_bytes:
            if not self._changes.keeps_as_it_marks:
                kept.copy_(packed)
            payload.copy_(packed)
            return None
        begin = 0
        for found, part in zip(marks, parts, strict=True):
            if found.extent.values:
                self._changes.write(packed[part], kept[part], found, found.extent.parts(payload[begin:]))
            begin += found.extent.num_bytes
        return [found.extent for found in marks]

    def _packing(self, message: CodedMessage, section: DeltaSection) -> Packing | None:
        if not self._changes.packs:
            return None
        assert self._table is not None, "begin and use come first"
        return Packing(self._table, section.first, section.last, (message.offset + section.begin) // section.item)

    def _decode(self, message: CodedMessage) -> None:
        assert self._memory is not None and self._table is not None, "begin and use come first"
        arrived = self._memory.bytes(message.base)[message.offset - HEADER_BYTES : message.offset + message.num_bytes]
        header: list[int] = arrived[:HEADER_BYTES].view(torch.int64).tolist()
        kind, length = header[:2]
        self.count.received += HEADER_BYTES + length
        if kind == WHOLE and length == message.num_bytes:
            self._table.launch(message.first, message.last)
            return
        made, begin = extents(message, header), HEADER_BYTES
        sound = kind == CHANGES and length <= message.num_bytes and min(header) >= 0
        if not sound or sum(extent.num_bytes for extent in made) != length:
            raise _damaged(message, header)
        for section, extent in zip(message.sections, made, strict=True):
            if extent.values:
                slices = self._slices[section.first : section.last]
                element = (message.offset + section.begin) // section.item
                parts = extent.parts(arrived[begin:])
                if not self._changes.apply(slices, element, extent, parts, self._memory.tensors):
                    raise _damaged(message, header)
            begin += extent.num_bytes


def _damaged(message: CodedMessage, header: list[int]) -> SyncError:
    return SyncError(
        f"a message of what changed does not fit the plan: its header is {header}, expected one of at most "
        f"{message.num_bytes} bytes in {len(message.sections)} sections. It was damaged on the way, or ranks run other "
        "versions of rltrain; weight_sync.delta=null sends everything"
    )
