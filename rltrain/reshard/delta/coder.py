"""Between pack and wire: what changed since it was sent last; and between wire and unpack: it is put in its places."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.reshard.delta.messages import (
    CHANGES,
    HEADER_BYTES,
    WHOLE,
    CodedMessage,
    Section,
    coded_messages,
    extents,
    header_of,
    kept_bytes,
)
from rltrain.reshard.execute.staging import Memory, byte_buffer
from rltrain.reshard.kernels.changes import Extent, Packing, changes_on, mark
from rltrain.reshard.kernels.copy_table import CopyTable
from rltrain.reshard.plan.stages import STAGES, Headers
from rltrain.reshard.plan.steps import Message, StageSteps, Steps


@dataclass(frozen=True)
class DeltaSettings:
    """`keep_on`: where senders keep what they sent; `in_shared_memory`: what passes through it is compared as well."""

    keep_on: Literal["device", "host"] = "device"
    in_shared_memory: bool = False


def headers_of(settings: DeltaSettings) -> Headers:
    """Of the stages whose messages are compared."""
    return tuple(HEADER_BYTES * (settings.in_shared_memory or not kind.shared) for kind in STAGES)


@dataclass
class Count:
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
        self.count = Count()

    @property
    def kept_bytes(self) -> int:
        """What this rank keeps of all that it sends."""
        return sum(kept_bytes(messages) for messages in self._sent)

    def begin(self, *, whole: bool) -> None:
        """A run that sends all where `whole`. SyncError where it is to send what changed since one that failed."""
        if not (whole or self._remembers):
            raise SyncError("a reshard is to send what changed, but the run before it did not come to its end")
        self.whole, self._remembers, self.count = whole, False, Count()
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

    def _packing(self, message: CodedMessage, section: Section) -> Packing | None:
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
