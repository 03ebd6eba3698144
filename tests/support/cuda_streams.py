"""Finds races between CUDA streams: a race is an error with the names of both operations.

Operations run on the CPU as they are issued. Vector clocks keep the order that a GPU would guarantee. The operations of
a stream follow each other and the host's calls that issued them. Events carry a stream's clock to another stream or to
the host. If one operation writes memory used by another, these clocks must order the two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
HOST = "host"


class RaceError(AssertionError):
    """Two operations have no order on a GPU."""


@dataclass(frozen=True)
class Region:
    """Bytes `begin` to `end` of the memory `owner`."""

    owner: int
    begin: int
    end: int

    def meets(self, other: "Region") -> bool:
        return self.owner == other.owner and self.begin < other.end and other.begin < self.end

    def covers(self, other: "Region") -> bool:
        return self.owner == other.owner and self.begin <= other.begin and other.end <= self.end


def region(tensor: Tensor) -> Region:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Region(tensor.untyped_storage()._cdata, begin, begin + (reach + 1) * tensor.itemsize * (tensor.numel() > 0))


@dataclass
class Actor:
    """An actor does its operations in order: the host, a stream, or a message in flight."""

    name: str
    clock: Clock = field(default_factory=dict)

    def join(self, clock: Clock) -> None:
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def step(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


@dataclass(frozen=True)
class Access:
    what: str
    writes: bool
    where: Region
    actor: str
    tick: int

    def is_before(self, clock: Clock) -> bool:
        return self.tick <= clock.get(self.actor, 0)

    def __str__(self) -> str:
        kind = "write" if self.writes else "read"
        return f"{self.what} ({kind} of bytes {self.where.begin} to {self.where.end}, on {self.actor})"


class Device:
    """All operations of one device and its host."""

    def __init__(self) -> None:
        self.host = Actor(HOST)
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self, "the default stream")
        self.nccl = Stream(self, "NCCL's stream")
        self.kept: dict[int, set[str]] = {}
        self._accesses: dict[int, list[Access]] = {}
        self._messages = count(1)

    def run(self, actor: Actor, what: str, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """Runs an operation of `actor`, issued by the host."""
        actor.join(self.host.clock)
        tick = actor.step()
        for accesses, kind in ((reads, False), (writes, True)):
            for where in accesses:
                if where.begin < where.end:
                    self._note(Access(what, kind, where, actor.name, tick), actor.clock)

    def message(self, what: str, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> Actor:
        """Starts an operation that runs beside the host until the host waits for it."""
        actor = Actor(f"message {next(self._messages)}")
        self.run(actor, what, reads=reads, writes=writes)
        return actor

    def allocated(self, owner: int, num_bytes: int) -> None:
        """Allocates device memory for the current stream. An earlier use on that stream may still be running."""
        self._accesses[owner] = []
        stream = self.current
        self.run(stream, f"the former use of memory that {stream.name} was given", writes=[Region(owner, 0, num_bytes)])

    def freed(self, owner: int, what: str, *, at_once: bool = False) -> None:
        """Frees memory: the current stream may reuse it next. With `at_once` its pages are unmapped."""
        keepers = set() if at_once else {self.current.name, *self.kept.pop(owner, ())}
        for access in self._accesses.pop(owner, []):
            if access.actor not in keepers and not access.is_before(self.host.clock):
                raise RaceError(f"{what} is freed while this may use it: {access}")

    def _note(self, new: Access, clock: Clock) -> None:
        kept = []
        for old in self._accesses.get(new.where.owner, []):
            if (old.writes or new.writes) and old.where.meets(new.where) and not old.is_before(clock):
                raise RaceError(f"nothing orders {new} after {old}")
            replaced = new.writes or (not old.writes and new.actor == old.actor)
            if not (replaced and new.where.covers(old.where)):
                kept.append(old)
        self._accesses[new.where.owner] = [*kept, new]

    def install(self, monkeypatch: Any) -> None:
        """Replaces the functions of torch.cuda."""
        device = self
        plain = {
            "Stream": lambda *_, **__: Stream(device, f"stream {len(device.streams)}"),
            "Event": lambda *_, **__: Event(device),
            "current_stream": lambda *_: device.current,
            "stream": lambda stream: device.within(stream),
            "synchronize": lambda *_: device.synchronize(),
            "mem_get_info": lambda *_: (2**40, 2**40),
            "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: 0,
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": lambda: None,
        }
        for name, stand_in in plain.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def within(self, stream: "Stream") -> "Within":
        return Within(self, stream)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class Stream(Actor):
    """Replaces torch.cuda.Stream."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(name)
        self._device = device
        device.streams.append(self)

    def record_event(self) -> "Event":
        event = Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.join(event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        self.join(stream.clock)

    def synchronize(self) -> None:
        self._device.host.join(self.clock)


class Within:
    """Replaces torch.cuda.stream(...). It can be entered many times."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(self._device.current)
        self._device.current = self._stream

    def __exit__(self, *error: object) -> None:
        self._device.current = self._before.pop()


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self._device.host.join(self.clock)

    def elapsed_time(self, later: "Event") -> float:
        return 0.0


class Operators(TorchDispatchMode):
    """Makes torch's operators operations of a device. Operators on `storages` run on its current stream, all others on
    the host. The host also waits for copies unless they are `non_blocking`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.storages: dict[int, UntypedStorage] = {}

    def holds(self, tensors: Iterable[Tensor]) -> None:
        """Registers tensors as device memory."""
        self.storages |= {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if operator.is_view or operator in (torch.ops.aten.set_.source_Storage, torch.ops.aten.detach.default):
            return result
        written, read = [], []
        for number, argument in enumerate(operator._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(t for t in tree_leaves(given) if isinstance(t, Tensor))
        device = self.device
        on_device = any(t.untyped_storage()._cdata in self.storages for t in (*written, *read))
        actor = device.current if on_device else device.host
        device.run(actor, str(operator), reads=map(region, read), writes=map(region, written))
        if (
            on_device
            and operator is torch.ops.aten.copy_.default
            and not kwargs.get("non_blocking", args[2:] == (True,))
        ):
            device.current.synchronize()
        return result
