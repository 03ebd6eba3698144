"""What runs in order and what at the same time: CUDA streams joined by events, or on the CPU just the order of calls.

A stream is work in order. Streams run side by side; where one must not overtake another it waits for an event that the
other has recorded. Only `Event.wait` and `Event.seconds_since` make the host wait.
"""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.reshard.copies import Message, Steps


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
