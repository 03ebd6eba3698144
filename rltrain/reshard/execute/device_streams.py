"""What runs in order and what at the same time: CUDA streams joined by events, or on the CPU just the order of calls.

A stream is work in order. Streams run side by side; where one must not overtake another it waits for an event that the
other has recorded. Only `Event.wait` and `Event.seconds_since` make the host wait.
"""

import time
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream's work."""

    def wait(self) -> None:
        """Make the host wait until the stream has come here."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds between two events that have been passed, of any streams of one device."""


class DeviceStream(Protocol):
    """Use as `with stream:` around the calls that issue its work."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...

    def after(self, event: Event | None) -> None:
        """What is issued from now on waits until `event` is passed."""

    def event(self) -> Event:
        """An event behind everything issued so far."""

    def keep(self, buffer: Tensor) -> None:
        """Do not reuse the memory of `buffer`, once it is freed, before this stream's work is done."""


class _HostEvent:
    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _HostEvent)
        return self.time_s - earlier.time_s


class _HostStream:
    """Calls are done when they return."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def after(self, event: Event | None) -> None:
        pass

    def event(self) -> Event:
        return _HostEvent()

    def keep(self, buffer: Tensor) -> None:
        pass


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream:
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
        streams: list[DeviceStream] = [_HostStream(), _HostStream(), _HostStream()]
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]
            streams = [_CudaStream(stream) for stream in self._streams]
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
