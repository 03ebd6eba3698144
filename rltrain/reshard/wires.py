"""Sends and receives the messages of successive rounds. The module has streams, the memory of messages, and wires.

A round is first expected, and started once it is packed. Arrived messages are unpacked and then marked as taken. All
ranks start the rounds in the same order.
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

# CUDA streams with events. On the CPU, work is done in the order of the calls.
#
# A stream is work in order, and streams run side by side. To keep an order between streams, one waits for an event
# recorded by another. Only `Event.wait` and `Event.seconds_since` make the host wait.


class Event:
    """A point in a stream's work. On the CPU it is a point in time, because work is done when it is issued."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        """Makes the host wait until the stream has reached this point."""

    def seconds_since(self, earlier: "Event") -> float:
        """Returns the seconds between two passed events. They may be from any streams of one device."""
        return self.time_s - earlier.time_s


class DeviceStream:
    """A stream of work. Calls inside `with stream:` issue work to it. On the CPU their work is done when they
    return."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the stream. Later calls issue no work to it."""

    def after(self, event: Event | None) -> None:
        """Makes work issued later wait until `event` is passed."""

    def event(self) -> Event:
        """Returns an event after all work issued so far."""
        return Event()

    def keep(self, buffer: Tensor) -> None:
        """Keeps the memory of `buffer` from being reused before this stream's work is done, even if it is freed."""


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
    """A separate CUDA stream. `DeviceStreams.begin` orders it after the device's current stream."""

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
    """The three streams of a reshard. Local copies run on `unpack`. Call `begin` before each use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        streams = [DeviceStream(), DeviceStream(), DeviceStream()]
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]
            streams = [*map(_CudaStream, self._streams)]
        self.pack, self.wire, self.unpack = streams

    def begin(self) -> Event:
        """Makes all streams wait for the present work of the current stream. Returns the event after this work."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.pack.event()

    def keep(self, buffer: Tensor) -> None:
        for stream in (self.pack, self.wire, self.unpack):
            stream.keep(buffer)

    def finish(self) -> None:
        """Makes the host wait for all streams."""
        for stream in self._streams:
            stream.synchronize()


# Memory of messages between pack and wire, and between wire and unpack.


class Memory:
    """The bases of a table as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._bytes: dict[int, Tensor] = {}

    def bytes(self, base: int) -> Tensor:
        """Returns all bytes of a base."""
        if base not in self._bytes:
            self._bytes[base] = self.tensors[base].detach().view(-1).view(torch.uint8)
        return self._bytes[base]

    def part(self, message: Message) -> Tensor:
        """Returns the bytes of a message within its base."""
        return self.bytes(message.base).narrow(0, message.offset, message.num_bytes)


def allocate(steps: Steps, device: torch.device, *, host: bool) -> tuple[Tensor, ...]:
    """Returns two buffers to send from and two to receive into. They fit the largest rounds of `steps` on a wire.

    Round k uses the buffers number k mod 2. If no stage has two rounds, both are the same buffer. Buffers are on
    `device`, or in pinned host memory if `host`.
    """
    stages = [stage for stage in steps.stages if not stage.kind.shared]
    num_buffers = 2 if max(stage.num_rounds for stage in stages) > 1 else 1
    made: list[Tensor] = []
    for num_bytes in (max(s.send_bytes for s in stages), max(s.receive_bytes for s in stages)):
        pair = [byte_buffer(num_bytes, device, host=host) for _ in range(num_buffers)]
        made += [pair[0], pair[-1]]
    return tuple(made)


def byte_buffer(num_bytes: int, device: torch.device, *, host: bool) -> Tensor:
    """Returns an uninitialised buffer of bytes on `device`, or in pinned host memory if `host`."""
    if device.type != "cpu":
        where = torch.device("cpu") if host else device
        return torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=host)
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # The system hands out memory by the page. With small pages this takes ten times as long as the pack.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# The transfers of one stage, on any transport.


class Wire(ABC):
    """The transfers of one stage on `rank`, issued to `stream`.

    `bytes_sent` counts the bytes handed to the transport, by peer. `bytes_received` counts the bytes of the expected
    messages. `spans` are complete once the stage is over. A span begins when messages are handed over. It ends when the
    received messages are through, or if nothing is received, when the sent ones are.

    If messages may be shorter than planned, there is one per peer in a round. `shortened` then returns a message with
    its actual length. `lengths` takes the bytes sent to each peer and returns the bytes received from each peer. It is
    collective over all ranks of the reshard. So only wires in need of lengths call it, and they do so in every round.
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
        """Prepares to receive round `number`. Its buffer is free after the event `free`, or at once if None."""

    @abstractmethod
    def start(self, number: int, packed: Event) -> None:
        """Sends round `number` and receives its expected messages. The messages to send are packed after the event
        `packed`."""

    @abstractmethod
    def left(self, number: int) -> Event:
        """Returns the event after all messages sent in round `number` have left their buffer."""

    @abstractmethod
    def arrived(self, number: int) -> Event:
        """Returns the event after all messages received in round `number` are in their buffer."""

    def taken(self, number: int, unpacked: Event) -> None:  # noqa: B027 - most transports need no such report
        """Reports the received messages of round `number` as unpacked after the event `unpacked`. Their sender may then
        overwrite them."""

    @abstractmethod
    def finish(self) -> Event:
        """Returns the event after all remaining messages have left and arrived. Call it after the rounds."""

    def leaving(self, number: int) -> list[Message]:
        """Returns the messages sent by round `number`. The round must be packed."""
        messages = self.steps.sends[number]
        return messages if self.shortened is None else [self.shortened(message) for message in messages]

    def count_sent(self, messages: list[Message]) -> None:
        for message in messages:
            self.bytes_sent[message.peer] += message.num_bytes

    def count_received(self, messages: list[Message]) -> None:
        self.bytes_received += sum(message.num_bytes for message in messages)

    def round(self, number: int) -> str:
        """Returns the name of a round for messages to the user."""
        return f"round {number + 1} of {self.steps.num_rounds}"

    def failed(self, what: str, error: RuntimeError | str) -> SyncError:
        """Returns an error about this rank's attempted transfer, to be raised instead of an `error` of the
        transport."""
        return SyncError(
            f"rank {self.rank} could not {what} in stage {self.steps.kind.name} of a reshard: {error}. Look in the "
            "log for the other rank's own message, which comes first. Config key timeouts.no_progress_s sets how long "
            "a rank waits for another"
        )


# A wire over gloo, in host memory.

Transfer = Callable[[list[Tensor], int, int], dist.Work]
"""The `send` or `recv` of a process group. It takes tensors, a rank within the group and a tag."""


class _Posted(NamedTuple):
    """A message on its way and its handle. `what` describes it for errors, such as "send {} to"."""

    what: str
    message: Message
    work: dist.Work


class GlooWire(Wire):
    """A wire over gloo. The host waits for messages, because gloo has no streams.

    A message leaves its sender only once it is expected, so receives are posted as early as possible. Messages in place
    are expected at once, and messages of a round when their buffer is free. A message may be shorter than its receive
    buffer.
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
        # torch.distributed.isend looks up the group and its ranks for every message. This costs more than posting it.
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


# A wire over NCCL, in device memory. A round is one group call.


class NcclWire(Wire):
    """A wire over NCCL. All work is issued to the stream, so the host never waits."""

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
        if self.lengths is not None:  # both ends must name the same length
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

    def finish(self) -> Event:
        return self.stream.event()

    def _operations(self, call: Callable[..., dist.Work | None], messages: list[Message]) -> list[dist.P2POp]:
        return [
            dist.P2POp(call, self._memory.part(message), message.peer, self._group, message.tag) for message in messages
        ]


# Shared memory of CPU ranks on one node. Their messages pass through no socket.

TOKEN_BYTES = 8
SLOTS = 2
PACKED_WORD, TAKEN_WORD = 0, 16
"""Indices of the counters among a rank's words. Each is on a cache line by itself."""


class MappedMemory:
    """The shared memory of one rank, mapped into this process.

    It has two slots and two counters. `packed` counts the rounds packed into the slots. `taken` counts the rounds taken
    out of the neighbours' slots. `process` names the rank's process as in runtime/machine.py.
    """

    def __init__(self, memory: SharedMemory, process: str) -> None:
        mapped = memory.map()
        words = mapped[: mmap.PAGESIZE].numpy().view(np.uint32)
        self.slots = mapped[mmap.PAGESIZE :].tensor_split(SLOTS)
        self.packed, self.taken = Signal(words, PACKED_WORD), Signal(words, TAKEN_WORD)
        self.process = process


@dataclass(frozen=True, eq=False)
class NeighbourMemory:
    """The memory of this rank and of its neighbours, ascending. `timeout_s` limits the wait for another rank."""

    own: MappedMemory
    neighbours: Mapping[int, MappedMemory]
    timeout_s: float

    @property
    def slots(self) -> list[Tensor]:
        """This rank's two slots, then two slots of every neighbour."""
        return [slot for memory in (self.own, *self.neighbours.values()) for slot in memory.slots]

    @property
    def own_bytes(self) -> int:
        return sum(slot.numel() for slot in self.own.slots)


class Neighbours:
    """The `candidates` able to share memory with this rank in both directions. `ranks` has them, ascending.

    Ranks find out by trying, because containers may keep ranks of one host apart. Two ranks share memory only if both
    can map it. Collective over: the agreement's ranks.
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
        """Exchanges the `shared_places` of all ranks and returns those of the neighbours. Collective over: the
        agreement's ranks."""
        rows = [self._agreement.ranks.index(peer) for peer in self.ranks]
        return ReadPlaces(self.ranks, self._agreement.exchange(places)[rows])

    def memory(self, slot_bytes: int, timeout_s: float) -> NeighbourMemory | None:
        """Returns slots of at least `slot_bytes`, or None if this rank has no shared memory. The memory lives while it
        is referenced.

        This object must not be used afterwards. Collective over: the agreement's ranks.
        """
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._own is not None:
            os.pwrite(self._own.file, bytes(TOKEN_BYTES), 0)  # the place of the counters
            self._own.resize(mmap.PAGESIZE + SLOTS * slot_bytes)
        self._agreement.meet()  # no rank may map memory before it has its size
        if self._own is None:
            return None
        own = MappedMemory(self._own, this_process())
        theirs = {peer: MappedMemory(memory, self._processes[peer]) for peer, memory in self._theirs.items()}
        for memory in (self._own, *self._theirs.values()):
            memory.close()
        return NeighbourMemory(own, theirs, timeout_s)

    def _offer(self) -> list[int]:
        """Returns (process, file, token). Another rank finds this rank's memory by the first two and recognises it by
        the token."""
        if self._own is None:
            return [0, 0, 0]
        token = secrets.token_bytes(TOKEN_BYTES)
        os.pwrite(self._own.file, token, 0)
        return [os.getpid(), self._own.file, int.from_bytes(token, "little", signed=True)]


def _created() -> SharedMemory | None:
    """Returns new shared memory. Returns None if the platform has none, or if there is no native code to count in
    it."""
    if not (AVAILABLE and native.available()):
        return None
    try:
        return SharedMemory.create()
    except OSError:
        return None


def _opened(process: int, file: int, token: int) -> SharedMemory | None:
    """Returns the memory offered by another process, or None if this process cannot reach it."""
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


# A wire without transfers. Messages stay in memory of their sender, and receivers unpack them from there.
#
# Each rank has two counters for its neighbours to see: rounds packed and rounds unpacked. All ranks go through the same
# rounds, so these numbers mean the same on each.

LOOK_S = 0.2
"""Seconds between two checks of the awaited process."""


class SharedWire(Wire):
    """A wire through shared memory. `first_round` counts the rounds before this stage, in all runs of the reshard
    together."""

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
        """Waits until `process`, the message's peer, has `done` something with a round. Raises SyncError if the process
        has ended or the time is over."""
        deadline = time.monotonic() + self._node.timeout_s
        while not signal.wait(self._count(number), LOOK_S):
            ended = has_ended(process)
            if ended or time.monotonic() > deadline:
                what = f"have {message.num_bytes} bytes of {self.round(number)} {done} by rank {message.peer}"
                reason = "its process has ended" if ended else f"it did not come within {self._node.timeout_s:g} s"
                raise self.failed(what, reason)
