"""Movable parts of a role's memory: device storages, parts on the host, memory of other processes, and late copies."""

import ctypes
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage

from rltrain.errors import ConfigError
from rltrain.offload.device_memory import MAPPED_BYTES, copy_bytes
from rltrain.offload.host_memory import HostRegion, aligned

# Ways to free and reallocate the memory of device storages.

SizedStorages = list[tuple[UntypedStorage, int]]
"""Storages, each with its bytes while it is on the device."""


class ResizedStorages:
    """Frees and reallocates storages by resizing them. Addresses change."""

    keeps_addresses = False
    """Whether reallocated memory has the same address as before. The first move may still change it."""

    def free(self, storages: SizedStorages) -> None:
        """Frees the memory. The contents are lost."""
        for storage, _ in storages:
            storage.resize_(0)

    def allocate(self, storages: SizedStorages) -> None:
        """Allocates the memory again with undefined contents."""
        for storage, size in storages:
            storage.resize_(size)

    def allocated_bytes(self, storages: SizedStorages) -> int:
        """Returns the bytes of memory allocated to the storages now."""
        return sum(storage.nbytes() for storage, _ in storages)


class PausedRegion:
    """Keeps storages in a region of torch_memory_saver. Its pages are unmapped and mapped again at unchanged addresses.

    A storage enters the region with its first reallocation. All storages of a part are freed and allocated together.
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


class ReservedMemory:
    """Device memory of the CUDA driver at reserved addresses. Physical memory leaves and returns, the addresses stay.

    Torch's allocator does not know of it. It is for tensors that one role makes once and keeps.
    """

    keeps_addresses = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mappings: dict[int, _Mapping] = {}

    def zeros(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Returns zeroed tensors of these shapes and dtypes, in one storage. Raises OutOfMemoryError if they do not
        fit."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        total = sum(aligned(size) for size in sizes)
        if not total:
            return [torch.zeros(*shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
        mapping = _Mapping(total, self._device)
        owner = _CudaArray(mapping.address, total)
        memory = torch.as_tensor(owner, device=self._device).zero_()  # its storage holds the owner
        self._mappings[mapping.address] = mapping
        weakref.finalize(owner, self._drop, mapping).atexit = False
        tensors, begin = [], 0
        for (shape, dtype), size in zip(kinds, sizes, strict=True):
            tensors.append(memory[begin : begin + size].view(dtype).view(*shape))
            begin += aligned(size)
        return tensors

    def free(self, storages: SizedStorages) -> None:
        for storage, _ in storages:
            if mapping := self._mappings.get(storage.data_ptr()):
                mapping.unmap()
            else:
                storage.resize_(0)

    def allocate(self, storages: SizedStorages) -> None:
        for storage, size in storages:
            if mapping := self._mappings.get(storage.data_ptr()):
                mapping.map()
            else:
                storage.resize_(size)

    def allocated_bytes(self, storages: SizedStorages) -> int:
        """Returns the bytes from torch's allocator, to which the memory here does not belong."""
        return sum(storage.nbytes() for storage, _ in storages if storage.data_ptr() not in self._mappings)

    def _drop(self, mapping: "_Mapping") -> None:
        del self._mappings[mapping.address]
        mapping.close()


class _CudaArray:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _Location(ctypes.Structure):
    """CUmemLocation of cuda.h."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h. The zeroed rest shares nothing and compresses nothing."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("rest", ctypes.c_uint64 * 2),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


class _Mapping:
    """A range of reserved addresses with physical memory, or without it after `unmap`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._location = _Location(_ON_DEVICE, device.index or 0)
        self._properties = _Properties(_PINNED, 0, self._location)
        self._handle: ctypes.c_uint64 | None = None
        granule, address = ctypes.c_size_t(), ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the device's context this thread's
            _driver("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), 0)
            self._size = ctypes.c_size_t(-(-num_bytes // granule.value) * granule.value)
            zero = ctypes.c_uint64(0)
            _driver("cuMemAddressReserve", ctypes.byref(address), self._size, ctypes.c_size_t(0), zero, zero)
        self._pointer, self.address = address, int(address.value)
        try:
            self.map()
        except BaseException:
            self.close()
            raise

    def map(self) -> None:
        """Gives the range physical memory with undefined contents. Raises OutOfMemoryError if there is too little."""
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        create = (ctypes.byref(handle), self._size, ctypes.byref(self._properties), zero)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            if _status("cuMemCreate", *create) == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # torch's allocator may hold it
                _driver("cuMemCreate", *create)
            self._handle = handle
            MAPPED_BYTES[self._device] += self._size.value
            _driver("cuMemMap", self._pointer, self._size, ctypes.c_size_t(0), handle, zero)
            access = _Access(self._location, _READ_WRITE)
            _driver("cuMemSetAccess", self._pointer, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        """Returns the physical memory to the device, once no kernel uses it."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            _driver("cuMemUnmap", self._pointer, self._size)
            _driver("cuMemRelease", self._handle)
        self._handle = None
        MAPPED_BYTES[self._device] -= self._size.value

    def close(self) -> None:
        """Gives up the addresses."""
        if self._handle is not None:
            self.unmap()
        _driver("cuMemAddressFree", self._pointer, self._size)


def _status(function: str, *arguments: Any) -> int:
    status: int = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    return status


def _driver(function: str, *arguments: Any) -> None:
    """Calls a function of the CUDA driver. Raises OutOfMemoryError or RuntimeError if it fails."""
    status = _status(function, *arguments)
    if status:
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{function} of the CUDA driver returned error {status}, not 0")


def reserved_memory(device: torch.device) -> ReservedMemory | None:
    """Returns memory at reserved addresses, or None if `device` has none: a CPU, or a GPU whose driver refuses it."""
    if device.type != "cuda":
        return None
    memory = ReservedMemory(device)
    try:
        (tensor,) = memory.zeros([((4,), torch.int64)])
        storages: SizedStorages = [(tensor.untyped_storage(), tensor.nbytes)]
        memory.free(storages)
        memory.allocate(storages)
        works = int(tensor.fill_(3).sum()) == 12
    except (OSError, AttributeError, RuntimeError):  # no driver, an old one, or one without virtual memory
        return None
    return memory if works else None


def memory_saver() -> Any:
    """Returns torch_memory_saver in hook mode for torch's allocator. Raises ConfigError if it is not installed."""
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


# A part of a role's memory that leaves the device and returns in place, such as the role's weights.


class MemoryPart:
    """The storages of some tensors, moved together and freed in place. Views and flat buffers stay valid.

    `tensors` is called at every departure, because an optimizer makes its states in its first step. `forget` is called
    before the part is dropped. It discards everything derived from the part.

    On the device call `save`, then `leave`. Away from it call `allocate`, then `fill`. Copies may still be running when
    `save` and `fill` return; wait for them with DeviceMemory.finish_copies. Not thread-safe.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, forget: Callable[[], None] = _nothing) -> None:
        self._tensors = tensors
        self._forget = forget
        self._region: HostRegion | None = None
        self._away: SizedStorages = []
        self.memory: ResizedStorages | PausedRegion | ReservedMemory = ResizedStorages()
        """Can be replaced while the part is on the device, before it leaves for the first time."""
        self.place: Literal["device", "host", "dropped"] = "device"
        self.host_is_current = False
        """Whether the host copy equals the device's content, or its content at the time of leaving."""
        self.times_emptied = 0
        """Number of returns without its content, for tasks that overwrite it."""
        self.settle: Callable[[], None] = _nothing
        """Called before the part moves. It must wait for readers on other threads."""

    @property
    def beneath(self) -> "MemoryPart | None":
        """The part lending its storages to this one while it is away itself. None if it has separate storages."""
        return None

    @property
    def size_bytes(self) -> int:
        """Bytes of its storages when on the device."""
        return sum(size for _, size in self.storages())

    @property
    def device_bytes(self) -> int:
        """Bytes of its storages on the device at present."""
        return self.size_bytes if self.place == "device" else 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated to its storages at present. 0 while it is away."""
        return self.memory.allocated_bytes(self.storages())

    @property
    def host_bytes(self) -> int:
        """Bytes kept on the host, even if they are out of date."""
        return self._region.num_bytes if self._region else 0

    def storages(self) -> SizedStorages:
        """Returns its distinct storages, on the device or away."""
        if self.place != "device":
            return self._away
        distinct: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            distinct.setdefault(storage._cdata, storage)
        return [(storage, storage.nbytes()) for storage in distinct.values()]

    def changed(self) -> None:
        """Marks the host copy as out of date. Call this whenever the part is written on the device."""
        self.host_is_current = False

    def save(self) -> None:
        """Copies it to the host unless the host copy is current."""
        self.settle()
        if self.place != "device":
            raise RuntimeError(f"cannot save a part with place {self.place}; expected it on the device")
        if not self.host_is_current:
            storages = self.storages()
            if self._region is None and storages:
                self._region = HostRegion(storages[0][0].device)
            copy_bytes((host, device) for device, host in self._images(storages))
            self.host_is_current = True

    def leave(self, *, drop: bool = False) -> None:
        """Frees its memory on the device. With `drop` the content is lost, and a task must overwrite it before the next
        read."""
        self.settle()
        if self.place != "device" or not (drop or self.host_is_current):
            raise RuntimeError(
                f"a part with place {self.place} and host_is_current {self.host_is_current} cannot leave; expected it "
                "on the device with a current host copy, or drop"
            )
        if drop:
            self._forget()
            self.host_is_current = False
        self._away = self.storages()
        self.place = "dropped" if drop else "host"
        self.memory.free(self._away)

    def allocate(self) -> None:
        """Allocates its memory on the device with undefined contents. Call `fill` next."""
        self.settle()
        if self.place == "device":
            raise RuntimeError("the part is already on the device")
        self.memory.allocate(self.storages())

    def fill(self, *, rewritten: bool = False) -> None:
        """Restores its content after `allocate`. With `rewritten` it is zeros, for a task that overwrites all of it."""
        if self.place == "dropped" and not rewritten:
            raise RuntimeError("a dropped part is needed by a task that does not overwrite it")
        storages = self.storages()
        if rewritten:
            self.times_emptied += 1
            _zero(storages)  # bytes that no task writes, such as padding, must not keep old values
        else:
            self._fill(storages)
        self.place, self._away = "device", []

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        """Returns a host copy of `count` elements of the flattened `tensor` from `first` on. Without `count` it copies
        the rest.

        `tensor` must be contiguous and use one of the part's storages. The part may be on the device or away. `into` is
        overwritten and returned; reusing it is several times faster than new memory. Raises RuntimeError if the part
        was dropped.
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
        """Raises RuntimeError if the part was dropped."""
        if self.place == "dropped":
            raise RuntimeError("a dropped part cannot be read")

    def _begin_on_host(self, wanted: UntypedStorage) -> int:
        begin = 0
        for storage, size in self.storages():
            if storage._cdata == wanted._cdata:
                return begin
            begin += aligned(size)
        raise RuntimeError("the tensor uses none of the part's storages")

    def _fill(self, storages: SizedStorages) -> None:
        copy_bytes(self._images(storages))

    def _images(self, storages: SizedStorages) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of (bytes on the device, the same bytes on the host)."""
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
    """Constant host tensors. They use another part's storages on the device while the other part is away.

    `host` has one tensor for each of `tensors`, equal in shape and dtype. `tensors` are views of the storages of
    `beneath`. `is_own` is False if the host tensors are memory of another process.
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
        raise RuntimeError("an overlay is constant; no task may write to it")

    def allocate(self) -> None:
        if self._beneath.place == "device":
            raise RuntimeError("an overlay needs the storages of another part, but that part is on the device")
        super().allocate()

    def _fill(self, storages: SizedStorages) -> None:
        _zero(storages)  # there may be padding between the tensors
        copy_bytes((tensor.detach(), host) for tensor, host in self._pairs)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Returns the whole storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _zero(storages: SizedStorages) -> None:
    for storage, _ in storages:
        as_bytes(storage).zero_()


# Parts with some or all tensors always on the host.


class PartOnHost(MemoryPart):
    """A part with `hosted` tensors that never leave the host. The other tensors of `tensors` move as usual.

    Hosted tensors are read in place and count as host memory of the part.
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
    """A part with all `tensors` always on the host. Nothing is ever on the device or moves, with any `place`."""

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


# Parts held on this rank's device by another process, such as an engine's server.


class RemotePart(MemoryPart):
    """Memory of another process.

    `release` makes the process free the memory, with loss of contents. `resume` makes it allocate the memory again.
    `restore` restores the contents from data kept by this process; it is None if nothing is kept. `num_bytes` returns
    the size of the memory. `kept_bytes` returns the host memory used by this process for `restore`.

    All callbacks may be collective over the ranks sharing the process. These ranks must host the same roles.
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
        """Always 0, since this process allocates nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        return self._kept_bytes()

    def storages(self) -> SizedStorages:
        return []

    def save(self) -> None:
        """Marks the part as saved. The data for `restore` is kept on arrival, so there is nothing to copy.

        Raises RuntimeError if nothing is kept.
        """
        if self._restore is None:
            raise RuntimeError("a part of another process can only be dropped if nothing of it is kept")
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


# Copies of a training state, made while training continues. They must be finished before the state changes.


class LateCopies:
    """A queue of pending copies of a model's state on `device`.

    Call `settle` before you read the copies, and before you change or move their sources. It makes the remaining
    copies, or waits for another thread to finish them. It may be called from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._left: deque[Callable[[], object]] = deque()
        self._waited_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Marks the state as complete: work already issued on the device has written it."""
        self.settle()
        if self._stream is not None:
            self._written = torch.cuda.current_stream(self._device).record_event()

    def add(self, part: MemoryPart, values: Tensor, first: int, count: int, into: Tensor | None) -> Tensor:
        """Returns a tensor for a future copy of `count` elements of `values` from `first` on, or `into` if given.
        `values` belongs to `part`. Raises RuntimeError if the part was dropped."""
        part.require_kept()
        copy = torch.empty(count, dtype=values.dtype) if into is None else into
        self._left.append(partial(part.read, values, first, count, into=copy))
        return copy

    def settle(self) -> None:
        if not self._left:
            return
        begin = time.perf_counter()
        while self._make_one():
            pass
        if threading.get_ident() == self._owner:
            self._waited_s += time.perf_counter() - begin

    def take_waited_s(self) -> float:
        """Returns the seconds spent by the training thread in `settle` since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _make_one(self) -> bool:
        with self._lock:  # held during the copy: an empty queue means that all copies are made
            if not self._left:
                return False
            with self._beside():
                self._left[0]()
            self._left.popleft()
            return True

    def _beside(self) -> AbstractContextManager[None]:
        """Selects a separate stream, so copies do not wait for work issued later."""
        if self._stream is None or self._written is None:
            return nullcontext()
        self._stream.wait_event(self._written)
        return torch.cuda.stream(self._stream)


class LateTensors(Mapping[str, Tensor]):
    """A mapping of `tensors` that finishes the pending copies of `late` before each access."""

    def __init__(self, tensors: Mapping[str, Tensor], late: LateCopies) -> None:
        self._tensors, self._late = tensors, late

    def __getitem__(self, name: str) -> Tensor:
        self._late.settle()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
