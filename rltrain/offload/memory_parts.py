"""Parts of a role's memory that leave the device and come back: storages, host parts, other processes' memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage

from rltrain.errors import ConfigError
from rltrain.offload.device_memory import copy_bytes
from rltrain.offload.host_memory import HostRegion, aligned

# How the memory of storages on the device is given up and taken again.

SizedStorages = list[tuple[UntypedStorage, int]]
"""Storages and the bytes that each has when it is on the device."""


class ResizedStorages:
    """Storages that are made empty and large again; addresses change."""

    keeps_addresses = False
    """Whether memory that is taken again lies where it did; the first time it may not."""

    def free(self, storages: SizedStorages) -> None:
        """Give up the memory, contents lost."""
        for storage, _ in storages:
            storage.resize_(0)

    def allocate(self, storages: SizedStorages) -> None:
        """Take as much again, contents undefined."""
        for storage, size in storages:
            storage.resize_(size)

    def allocated_bytes(self, storages: SizedStorages) -> int:
        """Bytes of memory behind them now."""
        return sum(storage.nbytes() for storage, _ in storages)


class PausedRegion:
    """As ResizedStorages, in a region of torch_memory_saver, whose pages go and come under unchanged addresses.

    A storage comes to the region when its memory is taken for the first time after it was given up. All storages of a
    part are freed and allocated together.
    """

    keeps_addresses = True

    def __init__(self, saver: Any, tag: str) -> None:
        self._saver, self._tag = saver, tag
        self._inside: dict[int, UntypedStorage] = {}
        self._paused = False

    def free(self, storages: SizedStorages) -> None:
        for storage, _ in storages:
            if storage._cdata not in self._inside:
                storage.resize_(0)
        if self._inside:
            self._saver.pause(self._tag)
        self._paused = True

    def allocate(self, storages: SizedStorages) -> None:
        if self._inside:
            self._saver.resume(self._tag)
        self._paused = False
        with self._saver.region(tag=self._tag):
            for storage, size in storages:
                if storage._cdata not in self._inside:
                    storage.resize_(size)
                    self._inside[storage._cdata] = storage

    def allocated_bytes(self, storages: SizedStorages) -> int:
        return 0 if self._paused else sum(storage.nbytes() for storage, _ in storages)


def memory_saver() -> Any:
    """torch_memory_saver in its hook mode for torch's allocator; ConfigError where it is not installed."""
    try:
        saver = import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ConfigError(
            "residency.allocator is torch_memory_saver, which is not installed in this Python environment "
            f"({error}); pip install torch-memory-saver, or set residency.allocator to torch"
        ) from None
    saver.hook_mode = "torch"
    return saver


def _nothing() -> None:
    pass


# A part of a role's memory, such as its weights, that leaves the device and comes back in place.


class MemoryPart:
    """The storages behind some tensors, moved whole and freed in place: views and flat buffers stay valid.

    `tensors` lists them anew at every departure, since an optimizer makes its states in its first step. `forget` gives
    up what belongs to the part and is made again by whoever needs it; called before the part is dropped.

    On the device: save, leave; away: allocate, fill. Copies may still be under way when `save` and `fill` return, which
    is what DeviceMemory.finish_copies is for. Not thread safe.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, forget: Callable[[], None] = _nothing) -> None:
        self._tensors = tensors
        self._forget = forget
        self._region: HostRegion | None = None
        self._away: SizedStorages = []
        self.memory: ResizedStorages | PausedRegion = ResizedStorages()
        """May be replaced while the part is on the device and has never left it."""
        self.place: Literal["device", "host", "dropped"] = "device"
        self.host_is_current = False
        """Whether the host has what the device has, or had when the part left."""
        self.times_emptied = 0
        """How often it came back without what it held, for a task that rewrites it."""
        self.settle: Callable[[], None] = _nothing
        """Called before the part moves: somebody may read it from another thread until then."""

    @property
    def beneath(self) -> "MemoryPart | None":
        """The part whose storages it uses when that one is away; None where it has its own."""
        return None

    @property
    def size_bytes(self) -> int:
        """Bytes of its storages on the device, when it is there."""
        return sum(size for _, size in self.storages())

    @property
    def device_bytes(self) -> int:
        """Bytes of its storages on the device now."""
        return self.size_bytes if self.place == "device" else 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes that its storages hold now: 0 while it is away."""
        return self.memory.allocated_bytes(self.storages())

    @property
    def host_bytes(self) -> int:
        """Bytes that it keeps on the host, current or not."""
        return self._region.num_bytes if self._region else 0

    def storages(self) -> SizedStorages:
        """Each once, whether the part is on the device or away."""
        if self.place != "device":
            return self._away
        distinct: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            distinct.setdefault(storage._cdata, storage)
        return [(storage, storage.nbytes()) for storage in distinct.values()]

    def changed(self) -> None:
        """Somebody writes to it on the device: what the host has of it is void."""
        self.host_is_current = False

    def save(self) -> None:
        """Copy it to the host unless that has it already."""
        self.settle()
        if self.place != "device":
            raise RuntimeError(f"a part that is {self.place} has nothing on the device to copy")
        if not self.host_is_current:
            storages = self.storages()
            if self._region is None and storages:
                self._region = HostRegion(storages[0][0].device)
            copy_bytes((host, device) for device, host in self._images(storages))
            self.host_is_current = True

    def leave(self, *, drop: bool = False) -> None:
        """Free its memory on the device; with `drop` nobody will read it again before it has been rewritten."""
        self.settle()
        if self.place != "device" or not (drop or self.host_is_current):
            raise RuntimeError(
                f"a part that is {self.place}, current on the host: {self.host_is_current}, cannot leave"
            )
        if drop:
            self._forget()
            self.host_is_current = False
        self._away = self.storages()
        self.place = "dropped" if drop else "host"
        self.memory.free(self._away)

    def allocate(self) -> None:
        """Take its memory on the device again, contents undefined. `fill` follows."""
        self.settle()
        if self.place == "device":
            raise RuntimeError("a part that is on the device has its memory")
        self.memory.allocate(self.storages())

    def fill(self, *, rewritten: bool = False) -> None:
        """Bring back what it held; zeros where a task is about to rewrite all of it. After `allocate`."""
        if self.place == "dropped" and not rewritten:
            raise RuntimeError("a part that was dropped is needed by a task that does not rewrite it")
        storages = self.storages()
        if rewritten:
            self.times_emptied += 1
            _zero(storages)  # what no task writes, such as padding, must not be what lay there before
        else:
            self._fill(storages)
        self.place, self._away = "device", []

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        """A copy on the host of `count` elements from `first` of `tensor`, flattened; all of them without a count.

        `tensor` is contiguous and lies in one of the part's storages, which may be on the device or away. `into` is
        written over and returned: being given new memory takes several times as long as copying. RuntimeError where
        the part was dropped.
        """
        self.require_kept()
        count = tensor.numel() - first if count is None else count
        copy = torch.empty(count, dtype=tensor.dtype) if into is None else into
        if not self.host_is_current:
            return copy.copy_(tensor.detach().view(-1)[first : first + count])
        begin = self._begin_on_host(tensor.untyped_storage()) + (int(tensor.storage_offset()) + first) * tensor.itemsize
        at = 0
        for piece in self._region.pieces(begin, copy.nbytes) if self._region else ():
            copy.view(torch.uint8)[at : at + piece.numel()] = piece
            at += piece.numel()
        return copy

    def require_kept(self) -> None:
        """RuntimeError where the part was dropped."""
        if self.place == "dropped":
            raise RuntimeError("a part that was dropped cannot be read")

    def _begin_on_host(self, wanted: UntypedStorage) -> int:
        begin = 0
        for storage, size in self.storages():
            if storage._cdata == wanted._cdata:
                return begin
            begin += aligned(size)
        raise RuntimeError("the tensor lies in none of the part's storages")

    def _fill(self, storages: SizedStorages) -> None:
        copy_bytes(self._images(storages))

    def _images(self, storages: SizedStorages) -> Iterator[tuple[Tensor, Tensor]]:
        """(bytes on the device, the same bytes on the host), pair by pair."""
        if self._region is None:
            return
        self._region.reserve(sum(aligned(size) for _, size in storages))
        begin = 0
        for storage, size in storages:
            device, first = as_bytes(storage), 0
            for host in self._region.pieces(begin, size):
                yield device[first : first + host.numel()], host
                first += host.numel()
            begin += aligned(size)


class OverlayPart(MemoryPart):
    """Constant values on the host that take the place of another part's while that one is away.

    `host` has one tensor for each of `tensors`, which are views of the storages of `beneath`, equal in shape and dtype;
    `is_own` is False where they lie in another process's memory.
    """

    def __init__(
        self, beneath: MemoryPart, tensors: Sequence[Tensor], host: Sequence[Tensor], *, is_own: bool = True
    ) -> None:
        super().__init__(lambda: tensors)
        self._beneath = beneath
        self._pairs = list(zip(tensors, host, strict=True))
        self._is_own = is_own
        self.place = "host"
        self.host_is_current = True

    @property
    def beneath(self) -> MemoryPart:
        return self._beneath

    @property
    def host_bytes(self) -> int:
        return sum(host.nbytes for _, host in self._pairs) if self._is_own else 0

    def storages(self) -> SizedStorages:
        return super().storages() if self.place == "device" else self._beneath.storages()

    def changed(self) -> None:
        raise RuntimeError("an overlay is constant: no task may write to it")

    def allocate(self) -> None:
        if self._beneath.place == "device":
            raise RuntimeError("an overlay takes the place of a part that is away; that one is on the device")
        super().allocate()

    def _fill(self, storages: SizedStorages) -> None:
        _zero(storages)  # between the tensors may be padding
        copy_bytes((tensor.detach(), host) for tensor, host in self._pairs)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """The whole storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _zero(storages: SizedStorages) -> None:
    for storage, _ in storages:
        as_bytes(storage).zero_()


# Parts of which some tensors, or all, lie on the host for good.


class PartOnHost(MemoryPart):
    """`hosted` are never on the device and never move; of `tensors`, which may have them too, the others come and go.

    The hosted ones are read where they lie, and count as the part's memory on the host.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], hosted: Sequence[Tensor]) -> None:
        self._hosted = {tensor.untyped_storage()._cdata for tensor in hosted}
        self._hosted_bytes = sum(tensor.nbytes for tensor in hosted)
        self._kept = hosted
        super().__init__(lambda: (tensor for tensor in tensors() if not self._is_hosted(tensor)))

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + self._hosted_bytes

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        if not self._is_hosted(tensor):
            return super().read(tensor, first, count, into=into)
        return _copied(tensor, first, count, into)

    def _is_hosted(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._hosted


class WholePartOnHost(MemoryPart):
    """All `tensors` are on the host for good: nothing of it is on the device, whatever its place, or ever moves."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(tuple)
        self._hosted_tensors = tensors

    @property
    def host_bytes(self) -> int:
        storages = (tensor.untyped_storage() for tensor in self._hosted_tensors())
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        return _copied(tensor, first, count, into)


def _copied(tensor: Tensor, first: int, count: int | None, into: Tensor | None) -> Tensor:
    values = tensor.detach().view(-1)[first : None if count is None else first + count]
    return values.clone() if into is None else into.copy_(values)


# A part of a role's memory that another process holds on this rank's device, such as the server of an engine.


class RemotePart(MemoryPart):
    """`release` makes the other process free the memory, contents lost, and `resume` take it again; `restore` brings
    the contents back from what this process keeps of them, None where it keeps nothing. `num_bytes` tells how much it
    is, `kept_bytes` how much host memory of its own this process has for `restore`. All may be collective over the
    ranks that share the process, which therefore host the same roles.
    """

    def __init__(
        self,
        *,
        release: Callable[[], None],
        resume: Callable[[], None],
        num_bytes: Callable[[], int],
        restore: Callable[[], None] | None = None,
        kept_bytes: Callable[[], int] = lambda: 0,
        forget: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(lambda: (), forget=forget)
        self._release, self._resume, self._restore = release, resume, restore
        self._num_bytes, self._kept_bytes = num_bytes, kept_bytes

    @property
    def size_bytes(self) -> int:
        return self._num_bytes()

    @property
    def allocated_bytes(self) -> int:
        """Of this process: none."""
        return 0

    @property
    def host_bytes(self) -> int:
        return self._kept_bytes()

    def storages(self) -> SizedStorages:
        return []

    def save(self) -> None:
        """What `restore` needs is kept as soon as it arrives, so nothing has to be copied."""
        if self._restore is None:
            raise RuntimeError("a part of another process of which nothing is kept can only be dropped")
        super().save()

    def leave(self, *, drop: bool = False) -> None:
        super().leave(drop=drop)
        self._release()

    def allocate(self) -> None:
        super().allocate()
        self._resume()

    def fill(self, *, rewritten: bool = False) -> None:
        super().fill(rewritten=rewritten)
        if not rewritten and self._restore is not None:
            self._restore()
