"""Sending and receiving the messages of one round after another: streams, the memory of messages, and wires.

A round is first expected, then started once it is packed; what arrived is taken by unpacking it. All ranks start the
rounds in the same order.
"""

import mmap
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import IntArray
from rltrain.reshard import native
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.copies import Message, StageSteps, Steps
from rltrain.reshard.native import Signal
from rltrain.reshard.rounds import ReadPlaces
from rltrain.runtime.machine import has_ended, process_here, this_process
from rltrain.runtime.shared_memory import AVAILABLE, SharedMemory

# What runs in order and what at the same time: CUDA streams joined by events, or on the CPU just the order of calls.
#
# A stream is work in order. Streams run side by side; where one must not overtake another it waits for an event that
# the other has recorded. Only `Event.wait` and `Event.seconds_since` make the host wait.


class Event:
    """A place in a stream's work; on the host, where that is done when it is issued, a time."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        """Make the host wait until the stream has come here."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds between two events that have been passed, of any streams of one device."""
        return self.time_s - earlier.time_s


class DeviceStream:
    """Use as `with stream:` around the calls that issue its work. On the host they are done when they return."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        """What is issued from here on is no work of this stream."""

    def after(self, event: Event | None) -> None:
        """What is issued from now on waits until `event` is passed."""

    def event(self) -> Event:
        """An event behind everything issued so far."""
        return Event()

    def keep(self, buffer: Tensor) -> None:
        """Do not reuse the memory of `buffer`, once it is freed, before this stream's work is done."""


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream(DeviceStream):
    """A stream of its own, which begins after what the device's current stream has been given before."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def after(self, event: Event | None) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)

    def event(self) -> Event:
        return _CudaEvent(self._stream)

    def keep(self, buffer: Tensor) -> None:
        if buffer.is_cuda:
            buffer.record_stream(self._stream)


class DeviceStreams:
    """The streams of a reshard: local copies share that of `unpack`. Made once; `begin` before each use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        streams = [DeviceStream(), DeviceStream(), DeviceStream()]
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]
            streams = [*map(_CudaStream, self._streams)]
        self.pack, self.wire, self.unpack = streams

    def begin(self) -> Event:
        """Let all streams wait for what the current stream has been given; the event behind that."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.pack.event()

    def keep(self, buffer: Tensor) -> None:
        for stream in (self.pack, self.wire, self.unpack):
            stream.keep(buffer)

    def finish(self) -> None:
        """Make the host wait for all streams."""
        for stream in self._streams:
            stream.synchronize()


# Memory of messages between pack and wire, and between wire and unpack.


@dataclass(frozen=True, eq=False)
class StagingBuffers:
    """Two buffers of bytes to send from and two to receive into; round k uses those of number k mod 2."""

    send: tuple[Tensor, Tensor]
    receive: tuple[Tensor, Tensor]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (*self.send, *self.receive)

    @property
    def num_bytes(self) -> int:
        """Of all distinct memory together."""
        return sum({buffer.data_ptr(): buffer.numel() for buffer in self.buffers}.values())


class Memory:
    """The memory of a table's bases as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._bytes: dict[int, Tensor] = {}

    def bytes(self, base: int) -> Tensor:
        """All of a base."""
        if base not in self._bytes:
            self._bytes[base] = self.tensors[base].detach().view(-1).view(torch.uint8)
        return self._bytes[base]

    def part(self, message: Message) -> Tensor:
        """What a message carries, or is to fill."""
        return self.bytes(message.base).narrow(0, message.offset, message.num_bytes)


def allocate(steps: Steps, device: torch.device, *, host: bool) -> StagingBuffers:
    """Buffers for the largest rounds of `steps` that go over a wire, on `device`; where `host`, in host memory that its
    kernels can address.

    Where no stage has two rounds the two buffers of a direction are one.
    """
    stages = [stage for stage in steps.stages if not stage.kind.shared]
    num_buffers = 2 if max(stage.num_rounds for stage in stages) > 1 else 1

    def pair(num_bytes: int) -> tuple[Tensor, Tensor]:
        made = [byte_buffer(num_bytes, device, host=host) for _ in range(num_buffers)]
        return made[0], made[-1]

    return StagingBuffers(pair(max(s.send_bytes for s in stages)), pair(max(s.receive_bytes for s in stages)))


def byte_buffer(num_bytes: int, device: torch.device, *, host: bool) -> Tensor:
    """Contents undefined; on `device`, or where `host` in host memory that its kernels can address."""
    if device.type != "cpu":
        where = torch.device("cpu") if host else device
        return torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=host)
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # The system hands memory out by the page, and small pages take it ten times as long as a pack takes to fill them.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# The transfers of one stage, whatever they travel on.


class Wire(ABC):
    """The transfers of one stage on `rank`, by work in `stream`.

    `bytes_sent` counts by peer what was handed to the transport, `bytes_received` what there was room for. `spans` are,
    once the stage is over, from when messages were handed over to when those that this rank receives, or else those
    that it sends, were through.

    Where messages may be shorter than the steps say, one for each peer in a round, `shortened` gives one that is to
    leave as long as it is, and `lengths` makes of those that leave to each peer those that come from each. That is
    collective over all ranks of the reshard, so it is only called by wires that must know, and in every round.
    """

    shortened: Callable[[Message], Message] | None = None
    lengths: Callable[[Mapping[int, int]], Mapping[int, int]] | None = None

    def __init__(self, steps: StageSteps, rank: int, stream: DeviceStream) -> None:
        self.steps, self.rank, self.stream = steps, rank, stream
        self.bytes_sent: Counter[int] = Counter()
        self.bytes_received = 0
        self.spans: list[tuple[Event, Event]] = []

    @abstractmethod
    def expect(self, number: int, free: Event | None) -> None:
        """Be ready to receive round `number`, whose buffer is `free` from that event on (None: now)."""

    @abstractmethod
    def start(self, number: int, packed: Event) -> None:
        """Send round `number`, whose messages are `packed` from that event on, and receive what was expected."""

    @abstractmethod
    def left(self, number: int) -> Event:
        """When the messages that round `number` sends have left their buffer."""

    @abstractmethod
    def arrived(self, number: int) -> Event:
        """When the messages that round `number` receives are in their buffer."""

    @abstractmethod
    def taken(self, number: int, unpacked: Event) -> None:
        """Those that round `number` receives are `unpacked` from that event on."""

    @abstractmethod
    def finish(self) -> Event:
        """When all that remains has left and arrived; after the rounds."""

    def leaving(self, number: int) -> list[Message]:
        """The messages that round `number`, which is packed, sends."""
        messages = self.steps.sends[number]
        return messages if self.shortened is None else [self.shortened(message) for message in messages]

    def count_sent(self, messages: list[Message]) -> None:
        for message in messages:
            self.bytes_sent[message.peer] += message.num_bytes

    def count_received(self, messages: list[Message]) -> None:
        self.bytes_received += sum(message.num_bytes for message in messages)

    def round(self, number: int) -> str:
        """How messages for people name it."""
        return f"round {number + 1} of {self.steps.num_rounds}"

    def failed(self, what: str, error: RuntimeError | str) -> SyncError:
        """In place of an `error` of the transport, one that says what this rank was about."""
        return SyncError(
            f"rank {self.rank} could not {what} in stage {self.steps.kind.name} of a reshard: {error}. Look for "
            "what ended or holds up the other rank: its own message comes first in the log. How long a rank waits "
            "for another is config key timeouts.no_progress_s"
        )


# A wire in host memory, over gloo.

Transfer = Callable[[list[Tensor], int, int], dist.Work]
"""(tensors, rank within the group, tag): `send` or `recv` of a process group."""


class _Posted(NamedTuple):
    """A message on its way and its handle; `what` is done with it, such as "send {} to"."""

    what: str
    message: Message
    work: dist.Work


class GlooWire(Wire):
    """The host waits for messages: gloo has no streams.

    A message leaves its sender only once it is expected, so receives are posted as early as can be: those in place at
    once, those of a round when their buffer is free. One may be shorter than what it is received into.
    """

    def __init__(
        self, steps: StageSteps, rank: int, stream: DeviceStream, memory: Memory, group: dist.ProcessGroup
    ) -> None:
        super().__init__(steps, rank, stream)
        self._memory, self._group = memory, group
        self._began: Event | None = None
        self._sends: dict[int, list[_Posted]] = {}
        self._receives: dict[int, list[_Posted]] = {}
        self._sends_in_place: list[_Posted] = []
        # torch.distributed.isend looks up the group and its ranks for every message, which costs more than posting it.
        self._places = {peer: place for place, peer in enumerate(dist.get_process_group_ranks(group))}
        self._receives_in_place = self._receive(steps.receives_in_place, "receive {} from")

    def expect(self, number: int, free: Event | None) -> None:
        if free is not None:
            free.wait()
        messages = self.steps.receives[number]
        self._receives[number] = self._receive(messages, f"receive {{}} of {self.round(number)} from")

    def start(self, number: int, packed: Event) -> None:
        packed.wait()
        self._began = self._began or self.stream.event()
        self._sends[number] = self._send(self.leaving(number), f"send {{}} of {self.round(number)} to")
        if number == 0:
            self._sends_in_place = self._send(self.steps.sends_in_place, "send {} to")

    def left(self, number: int) -> Event:
        return self._wait(self._sends.pop(number))

    def arrived(self, number: int) -> Event:
        return self._wait(self._receives.pop(number))

    def taken(self, number: int, unpacked: Event) -> None:
        """The sender has it from gloo that its buffer is free."""

    def finish(self) -> Event:
        received = self._wait(self._receives_in_place)
        sent = self._wait(self._sends_in_place)
        for number in sorted(self._sends):
            sent = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, received if self.bytes_received else sent)]
        return sent

    def _send(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_sent(messages)
        return self._post(self._group.send, messages, what)

    def _receive(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_received(messages)
        return self._post(self._group.recv, messages, what)

    def _post(self, transfer: Transfer, messages: list[Message], what: str) -> list[_Posted]:
        posted = []
        for message in messages:
            try:
                work = transfer([self._memory.part(message)], self._places[message.peer], message.tag)
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
            posted.append(_Posted(what, message, work))
        return posted

    def _wait(self, posted: list[_Posted]) -> Event:
        for what, message, work in posted:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
        return self.stream.event()


def _described(what: str, message: Message) -> str:
    return f"{what.format(f'{message.num_bytes} bytes')} rank {message.peer}"


# A wire in device memory: a round is one group call of NCCL.


class NcclWire(Wire):
    """All of it is issued to the stream: the host never waits."""

    def __init__(
        self, steps: StageSteps, rank: int, stream: DeviceStream, memory: Memory, group: dist.ProcessGroup
    ) -> None:
        super().__init__(steps, rank, stream)
        self._memory, self._group = memory, group
        assert not (steps.sends_in_place or steps.receives_in_place), "a round is one call: all of it is staged"
        self._free: dict[int, Event | None] = {}
        self._done: dict[int, Event] = {}

    def expect(self, number: int, free: Event | None) -> None:
        self._free[number] = free

    def start(self, number: int, packed: Event) -> None:
        stream = self.stream
        sends, receives = self.leaving(number), self.steps.receives[number]
        if self.lengths is not None:  # both ends must name the same
            coming = self.lengths({message.peer: message.num_bytes for message in sends})
            receives = [message._replace(num_bytes=coming[message.peer]) for message in receives]
        self.count_sent(sends)
        self.count_received(receives)
        operations = [*self._operations(dist.isend, sends), *self._operations(dist.irecv, receives)]
        with stream:
            stream.after(packed)
            stream.after(self._free.pop(number))
            began = stream.event()
            if operations:
                peers = sorted({operation.peer for operation in operations})
                try:
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()  # makes the stream wait, not the host
                except RuntimeError as error:
                    what = f"exchange {self.round(number)} with ranks {peers}"
                    raise self.failed(what, error) from error
            self._done[number] = stream.event()
        if operations:
            self.spans.append((began, self._done[number]))

    def left(self, number: int) -> Event:
        return self._done[number]

    def arrived(self, number: int) -> Event:
        return self._done[number]

    def taken(self, number: int, unpacked: Event) -> None:
        """The sender has it from NCCL that its buffer is free."""

    def finish(self) -> Event:
        return self.stream.event()

    def _operations(self, call: Callable[..., dist.Work | None], messages: list[Message]) -> list[dist.P2POp]:
        return [
            dist.P2POp(call, self._memory.part(message), message.peer, self._group, message.tag) for message in messages
        ]


# Ranks that read each other's memory, so that what goes between them passes through no socket.

TOKEN_BYTES = 8
SLOTS = 2
PACKED_WORD, TAKEN_WORD = 0, 16
"""Of a rank's words, on cache lines of their own."""


class MappedMemory:
    """One rank's, as it is mapped here: two slots, and how many rounds it has `packed` into them and has `taken` out of
    its neighbours'. `process` is the rank's, as runtime/machine.py names it."""

    def __init__(self, memory: SharedMemory, process: str) -> None:
        mapped = memory.map()
        words = mapped[: mmap.PAGESIZE].numpy().view(np.uint32)
        self.slots = mapped[mmap.PAGESIZE :].tensor_split(SLOTS)
        self.packed, self.taken = Signal(words, PACKED_WORD), Signal(words, TAKEN_WORD)
        self.process = process


@dataclass(frozen=True, eq=False)
class NeighbourMemory:
    """This rank's memory and that of its neighbours, ascending; `timeout_s` is how long one waits for another."""

    own: MappedMemory
    neighbours: Mapping[int, MappedMemory]
    timeout_s: float

    @property
    def slots(self) -> list[Tensor]:
        """This rank's two, then two of every neighbour."""
        return [slot for memory in (self.own, *self.neighbours.values()) for slot in memory.slots]

    @property
    def own_bytes(self) -> int:
        return sum(slot.numel() for slot in self.own.slots)


class Neighbours:
    """Finds out which of `candidates` can map this rank's memory, and it theirs: those are its `ranks`, ascending.

    Whether ranks can is tried and not derived: those in containers of their own may not, whatever their host. What
    cannot be reached by both of two ranks is reached by neither. Collective over: the agreement's ranks.
    """

    def __init__(self, agreement: Agreement, candidates: Sequence[int]) -> None:
        self._agreement = agreement
        self._own = _created() if candidates else None
        offers = agreement.exchange(np.repeat([self._offer()], len(agreement.ranks), axis=0))
        found = {peer: offers[agreement.ranks.index(peer)].tolist() for peer in sorted(candidates)}
        opened = {peer: _opened(*offer) for peer, offer in found.items() if self._own}
        mutual = agreement.exchange(np.array([[bool(opened.get(peer))] for peer in agreement.ranks], dtype=np.int64))
        self._theirs: dict[int, SharedMemory] = {}
        for peer, memory in opened.items():
            if memory and mutual[agreement.ranks.index(peer), 0]:
                self._theirs[peer] = memory
            elif memory:
                memory.close()
        self.ranks = tuple(self._theirs)
        self._processes = {peer: process_here(found[peer][0]) for peer in self.ranks}

    def read_places(self, places: IntArray) -> ReadPlaces:
        """From the `shared_places` that each rank has come to. Collective over: the agreement's ranks."""
        rows = [self._agreement.ranks.index(peer) for peer in self.ranks]
        return ReadPlaces(self.ranks, self._agreement.exchange(places)[rows])

    def memory(self, slot_bytes: int, timeout_s: float) -> NeighbourMemory | None:
        """Slots of at least `slot_bytes`, for as long as they are referred to; None where this rank cannot have any.

        Ends the use of this object. Collective over: the agreement's ranks.
        """
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._own is not None:
            os.pwrite(self._own.file, bytes(TOKEN_BYTES), 0)  # where the counters will be
            self._own.resize(mmap.PAGESIZE + SLOTS * slot_bytes)
        self._agreement.meet()  # so that nobody maps what has not its size yet
        if self._own is None:
            return None
        own = MappedMemory(self._own, this_process())
        theirs = {peer: MappedMemory(memory, self._processes[peer]) for peer, memory in self._theirs.items()}
        for memory in (self._own, *self._theirs.values()):
            memory.close()
        return NeighbourMemory(own, theirs, timeout_s)

    def _offer(self) -> list[int]:
        """What another rank needs to find this rank's memory, and to know it again: process, file and token."""
        if self._own is None:
            return [0, 0, 0]
        token = secrets.token_bytes(TOKEN_BYTES)
        os.pwrite(self._own.file, token, 0)
        return [os.getpid(), self._own.file, int.from_bytes(token, "little", signed=True)]


def _created() -> SharedMemory | None:
    """None where this rank has no such memory, or no native code to count in it."""
    if not (AVAILABLE and native.available()):
        return None
    try:
        return SharedMemory.create()
    except OSError:
        return None


def _opened(process: int, file: int, token: int) -> SharedMemory | None:
    """What another process offers, or None where this one does not reach it."""
    if not process:
        return None
    try:
        memory = SharedMemory.open(process, file)
    except OSError:
        return None
    if os.pread(memory.file, TOKEN_BYTES, 0) == token.to_bytes(TOKEN_BYTES, "little", signed=True):
        return memory
    memory.close()
    return None


# No wire at all: messages stay in memory of their sender, from which the receivers unpack them.
#
# Each rank has two counters that its neighbours see: how many rounds it has packed, and how many it has unpacked. All
# ranks go through the same rounds, so that these numbers mean the same on each.

LOOK_S = 0.2
"""How often a rank that waits for another looks whether it still runs."""


class SharedWire(Wire):
    """`first_round` is how many rounds ranks have gone through before this stage, in all runs of a reshard together."""

    def __init__(
        self, steps: StageSteps, rank: int, stream: DeviceStream, node: NeighbourMemory, first_round: int
    ) -> None:
        super().__init__(steps, rank, stream)
        self._node, self._first_round = node, first_round
        self._began: Event | None = None
        self._received: Event | None = None
        self._not_left: list[int] = []

    def expect(self, number: int, free: Event | None) -> None:
        self.count_received(self.steps.receives[number])

    def start(self, number: int, packed: Event) -> None:
        packed.wait()
        self._began = self._began or self.stream.event()
        self.count_sent(self.leaving(number))
        self._not_left.append(number)
        self._node.own.packed.set(self._count(number))

    def left(self, number: int) -> Event:
        self._not_left.remove(number)
        for message in self.steps.sends[number]:
            reader = self._node.neighbours[message.peer]
            self._wait(reader.taken, number, message, reader.process, "read")
        return self.stream.event()

    def arrived(self, number: int) -> Event:
        messages = self.steps.receives[number]
        for message in messages:
            sender = self._node.neighbours[message.peer]
            self._wait(sender.packed, number, message, sender.process, "packed")
        event = self.stream.event()
        self._received = event if messages else self._received
        return event

    def taken(self, number: int, unpacked: Event) -> None:
        unpacked.wait()
        self._node.own.taken.set(self._count(number))

    def finish(self) -> Event:
        end = self.stream.event()
        for number in list(self._not_left):
            end = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, self._received or end)]
        return end

    def _count(self, number: int) -> int:
        return self._first_round + number + 1

    def _wait(self, signal: Signal, number: int, message: Message, process: str, done: str) -> None:
        """Until `process`, the message's peer, has `done` something with a round."""
        deadline = time.monotonic() + self._node.timeout_s
        while not signal.wait(self._count(number), LOOK_S):
            ended = has_ended(process)
            if ended or time.monotonic() > deadline:
                what = f"have {message.num_bytes} bytes of {self.round(number)} {done} by rank {message.peer}"
                reason = "its process has ended" if ended else f"it has not come in {self._node.timeout_s:g} s"
                raise self.failed(what, reason)
