"""What runs in order and what at the same time: CUDA streams joined by events, or on the CPU just the order of calls.

A lane is work in order. Lanes run side by side; where one must not overtake another it waits for a mark that the other
has left. Only `Mark.wait` and `Mark.seconds_since` make the host wait.
"""

import time
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a lane's work."""

    def wait(self) -> None:
        """Make the host wait until the lane has come here."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds between two marks that have been passed, of any lanes of one device."""


class Lane(Protocol):
    """Use as `with lane:` around the calls that issue its work."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...

    def after(self, mark: Mark | None) -> None:
        """What is issued from now on waits until `mark` is passed."""

    def mark(self) -> Mark:
        """A mark behind everything issued so far."""

    def keep(self, buffer: Tensor) -> None:
        """Do not reuse the memory of `buffer`, once it is freed, before this lane's work is done."""


class _HostMark:
    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self.time_s - earlier.time_s


class _HostLane:
    """Calls are done when they return."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def after(self, mark: Mark | None) -> None:
        pass

    def mark(self) -> Mark:
        return _HostMark()

    def keep(self, buffer: Tensor) -> None:
        pass


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaLane:
    """A stream of its own, which begins after what the device's current stream has been given before."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def after(self, mark: Mark | None) -> None:
        if isinstance(mark, _CudaMark):
            self._stream.wait_event(mark.event)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def keep(self, buffer: Tensor) -> None:
        if buffer.is_cuda:
            buffer.record_stream(self._stream)


class Lanes:
    """The lanes of a reshard: local copies share that of `unpack`. Made once; `begin` before each use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        lanes: list[Lane] = [_HostLane(), _HostLane(), _HostLane()]
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in lanes]  # type: ignore[no-untyped-call]
            lanes = [_CudaLane(stream) for stream in self._streams]
        self.pack, self.wire, self.unpack = lanes

    def begin(self) -> Mark:
        """Let all lanes wait for what the current stream has been given; the mark behind that."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.pack.mark()

    def keep(self, buffer: Tensor) -> None:
        for lane in (self.pack, self.wire, self.unpack):
            lane.keep(buffer)

    def finish(self) -> None:
        """Make the host wait for all lanes."""
        for stream in self._streams:
            stream.synchronize()
