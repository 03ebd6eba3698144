"""Sends only changes. Encodes messages between pack and wire, and decodes them between wire and unpack."""

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

# The choice between sending everything and sending changes, for each sync of a destination.

DENSE_SHARE = 0.9
"""If this share of the compared bytes is sent, comparing has saved nothing."""

FIRST_REST, LONGEST_REST = 4, 64
"""Numbers of syncs sent whole and not remembered after remembering was in vain. The number doubles each time, from the
first to the second."""


class DeltaTurn(Enum):
    """The kind of a sync. PLAIN sends everything and remembers nothing. WHOLE sends and remembers everything. CHANGES
    sends only changes."""

    PLAIN = "plain"
    WHOLE = "whole"
    CHANGES = "changes"


@dataclass
class DeltaTurns:
    """The choice of the kind of each sync, equal on all its ranks.

    `full_every` is the number of syncs from one sent whole to the next. Every `check_every`-th sync of changes is
    compared with its source (0 for none). The first one always is, and so are all after a difference.
    """

    full_every: int
    check_every: int = 0
    compares: bool = field(default=False, init=False)
    """Whether to compare both sides after the present sync."""
    _remembers: bool = field(default=False, init=False)
    _since_full: int = field(default=0, init=False)
    _num_changes: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)
    """Number of following syncs to be sent whole and not compared."""
    _last_rest: int = field(default=0, init=False)
    _trusted: bool = field(default=True, init=False)

    def next(self, *, lost: bool) -> DeltaTurn:
        """Begins a sync and returns its kind. `lost` means some rank's destination differs from the result of the last
        sync. Call `finished` after the sync, unless it failed."""
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
        """Ends a sync. `sent_share` is the sent part of the bytes compared by a sync of changes, or 1 if it compared
        none."""
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
        """Records a difference between the result of a sync of changes and its source."""
        self._trusted = False

    def _give_up(self) -> None:
        """Stops remembering for some syncs, because it was in vain. Their number doubles each time."""
        self._rest = self._last_rest = min(max(2 * self._last_rest, FIRST_REST), LONGEST_REST)

    def _turn(self, lost: bool) -> DeltaTurn:
        if self._rest > 0:
            return DeltaTurn.PLAIN
        due = self._since_full + 1 >= self.full_every
        return DeltaTurn.WHOLE if lost or due or not self._remembers else DeltaTurn.CHANGES


# Messages with changes, and the packed elements of each.
#
# A message begins with a header of 8-byte numbers. They are WHOLE or CHANGES, the number of following bytes, and for
# each section the numbers of encoded places and values. The packed bytes follow, or their sections in the format of
# csrc/reshard_delta.h, one after another.

WHOLE, CHANGES = 1, 2

MAX_SECTIONS = 3
"""One section each for elements of 4, 2 and 1 bytes."""

HEADER_BYTES = 8 * (2 + 2 * MAX_SECTIONS)


@dataclass(frozen=True)
class DeltaSection:
    """A part of a message with elements of one size. It has `elements` of `item` bytes from byte `begin` of the packed
    bytes on, made by slices `first:last` of the table."""

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
    """A message with a header. `num_bytes` are packed at byte `offset` of base number `base`, after the header. On the
    sender, the last sent bytes are at byte `kept` of the stage's memory."""

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
    """Returns the messages with distinct memory of every round, in the order of their slices.

    `bounds[k]:bounds[k + 1]` of the table `slices` [SLICE] belong to round k. `types` [slices] are their types on the
    wire.
    """
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
    """Returns the sections of slices with `sizes` bytes and `items` bytes per element. `first` is the number of the
    first slice in the table."""
    starts = np.flatnonzero(np.diff(items, prepend=0)).tolist()
    ends = np.cumsum(sizes)
    made = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        begin, item = int(ends[start] - sizes[start]), int(items[start])
        made.append(DeltaSection(begin, (int(ends[end - 1]) - begin) // item, item, first + start, first + end))
    assert len(made) <= MAX_SECTIONS, "wide elements precede narrow ones"
    return tuple(made)


def kept_bytes(messages: Sequence[Sequence[CodedMessage]]) -> int:
    """Returns the bytes kept by a sender for a stage."""
    return max((made.kept + rounded_up(made.num_bytes) for coded in messages for made in coded), default=0)


def extents(message: CodedMessage, header: Sequence[int]) -> list[Extent]:
    """Returns the extents of a message's sections, from the numbers of its header."""
    return [
        Extent(section.elements, section.item, header[2 + 2 * number], header[3 + 2 * number])
        for number, section in enumerate(message.sections)
    ]


def header_of(kind: int, num_bytes: int, made: Sequence[Extent]) -> list[int]:
    """Returns the numbers of a header."""
    numbers = [kind, num_bytes, *(number for extent in made for number in (extent.places, extent.values))]
    return numbers + [0] * (HEADER_BYTES // 8 - len(numbers))


# Encoding between pack and wire, and decoding between wire and unpack.


@dataclass(frozen=True)
class DeltaSettings:
    """The settings of deltas. Senders keep their last sent bytes on `keep_on`. With `in_shared_memory`, messages in
    shared memory are compared as well."""

    keep_on: Literal["device", "host"] = "device"
    in_shared_memory: bool = False


def headers_of(settings: DeltaSettings) -> Headers:
    """Returns the bytes of the headers of each stage. They are 0 if its messages are not compared."""
    return tuple(HEADER_BYTES * (settings.in_shared_memory or not kind.shared) for kind in STAGES)


@dataclass
class DeltaCount:
    """The bytes of one run on this rank. `compared` were packed and compared, `changed` of them differed, and `sent`
    were sent for them. `received` were received."""

    compared: int = 0
    changed: int = 0
    sent: int = 0
    received: int = 0


class Coder:
    """The memory of one rank's last run, by the messages with headers in `steps`.

    The sender keeps all packed bytes. The receiver uses the destination itself, so no other code may write to it.
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
        """Packed bytes of the rounds to be compared. All other rounds are packed into the send buffers of wires."""
        self.whole = True
        """Whether the run sends everything."""
        self.count = DeltaCount()

    @property
    def kept_bytes(self) -> int:
        """Bytes kept by this rank for all its sends."""
        return sum(kept_bytes(messages) for messages in self._sent)

    def begin(self, *, whole: bool) -> None:
        """Begins a run. It sends everything if `whole`. Raises SyncError if it should send changes after a failed
        run."""
        if not (whole or self._remembers):
            raise SyncError("a reshard cannot send only changes, because the run before it did not finish")
        self.whole, self._remembers, self.count = whole, False, DeltaCount()
        if not self._kept:
            on_host = self._settings.keep_on == "host"
            self._kept = [byte_buffer(kept_bytes(sent), self._device, host=on_host) for sent in self._sent]
        self.scratch = byte_buffer(0 if whole else self.scratch_bytes, self._device, host=False)

    def use(self, memory: Memory, table: CopyTable) -> None:
        """Sets the memory of the wires and the table for packing. The table packs into `scratch`, unless everything is
        sent."""
        self._memory, self._table = memory, table

    def finish(self) -> None:
        """Ends a successful run. The next one may send changes."""
        self._remembers = True
        self.release()

    def release(self) -> None:
        """Drops the memory and the table of a run."""
        self._memory = self._table = None
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def encode(self, steps: StageSteps, number: int) -> None:
        """Packs a round into its messages. Messages of changes become as short as their encoding."""
        assert self._table is not None, "begin and use come first"
        stage = self._stages[steps.kind]
        if self.whole or not self._changes.packs:
            self._table.launch(steps.pack[number], steps.pack[number + 1])
        for message in self._sent[stage][number]:
            self._lengths[message.base, message.offset] = HEADER_BYTES + self._encode(message, self._kept[stage])

    def shortened(self, message: Message) -> Message:
        """Returns a message of the last encoded round with its actual length."""
        return message._replace(num_bytes=self._lengths[message.base, message.offset + HEADER_BYTES])

    def decode(self, steps: StageSteps, number: int) -> None:
        """Writes the arrived messages of a round to their destinations."""
        for message in self._received[self._stages[steps.kind]][number]:
            self._decode(message)

    def _encode(self, message: CodedMessage, all_kept: Tensor) -> int:
        """Encodes one message and returns the bytes after its header."""
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
        """Writes the changes to `payload`. If they take more bytes than the whole message, writes the whole message and
        returns None. In both cases `kept` becomes the packed bytes."""
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
        f"a message of changes does not fit the plan: its header is {header}, expected one of at most "
        f"{message.num_bytes} bytes in {len(message.sections)} sections. It was damaged on the way, or ranks run "
        "different versions of rltrain (weight_sync.delta=null sends everything)"
    )
