"""Host memory: buffers for offloaded parts, tensors shared by processes of a node, and one copy of equal tensors per
node."""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import this_machine
from rltrain.runtime.shared_memory import SharedMemory

# Buffers for offloaded parts. They are allocated once, reused for every move, and pinned with CUDA.

SLAB_BYTES = 256 * 2**20
"""Largest slab. Torch allocates pinned memory in powers of two, so one large buffer could waste half of itself."""
SMALLEST_SLAB_BYTES = 2**20
ALIGNMENT_BYTES = 64


class HostRegion:
    """A growing range of bytes on the host, in slabs with constant addresses."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.slabs: list[Tensor] = []
        """uint8 tensors. Concatenated they are the bytes of the region."""

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() for slab in self.slabs)

    def reserve(self, num_bytes: int) -> None:
        """Grows the region to at least `num_bytes` and keeps its contents."""
        while (missing := num_bytes - self.num_bytes) > 0:
            self.slabs.append(torch.empty(self._slab_bytes(missing), dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, begin: int, num_bytes: int) -> Iterator[Tensor]:
        """Yields bytes `begin` to `begin + num_bytes` in order. Raises ValueError if they were not reserved."""
        if begin < 0 or begin + num_bytes > self.num_bytes:
            raise ValueError(
                f"bytes {begin} to {begin + num_bytes} are not in the host region of {self.num_bytes} bytes"
            )
        first = 0
        for slab in self.slabs:
            start, end = max(begin - first, 0), min(begin + num_bytes - first, slab.numel())
            if start < end:
                yield slab[start:end]
            first += slab.numel()

    def _slab_bytes(self, missing: int) -> int:
        if not self._pinned:
            return missing
        power_of_two = 1 << (missing - 1).bit_length()
        return min(max(power_of_two, SMALLEST_SLAB_BYTES), SLAB_BYTES)


def aligned(num_bytes: int) -> int:
    """Rounds up to the alignment of storages in a region."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Host tensors in one range of memory, shared by processes of a node and accessible to CUDA copies.

PORTABLE = 1
"""Flag of cudaHostRegister: the memory is pinned for all devices."""

Place = tuple[str, int, int]
"""(machine, process id, number of an open file in that process)."""


class HostTensors:
    """Tensors with the shapes and dtypes of `like`, concatenated in one range of shared memory. They start as zeros.

    With CUDA the memory is pinned in place. Torch's own pinned memory would round each tensor up to a power of two, and
    could not be shared. Pass `memory` to use the memory of another process with the same tensors. The memory stays
    until this process ends.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device, memory: SharedMemory | None = None) -> None:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in like.items()}
        num_bytes = sum(map(aligned, sizes.values()))
        self.is_own = memory is None
        self._memory = memory or SharedMemory.create()
        if self.is_own:
            self._memory.resize(num_bytes)
        elif self._memory.num_bytes != num_bytes:
            raise ValueError(
                f"shared memory has {self._memory.num_bytes} bytes; expected {num_bytes} for these tensors"
            )
        mapped = self._memory.map()
        if not self.is_own:
            self._memory.close()
        if device.type == "cuda":
            pin(mapped)
        self.tensors: dict[str, Tensor] = {}
        first = 0
        for name, tensor in like.items():
            self.tensors[name] = mapped[first : first + sizes[name]].view(tensor.dtype).view(tensor.shape)
            first += aligned(sizes[name])

    @classmethod
    def of_another(cls, place: Place, like: Mapping[str, Tensor], device: torch.device) -> Self:
        """Returns the filled tensors of another process at `place`. Raises OSError if this process cannot access
        them."""
        machine, process, file = place
        if machine != this_machine():
            raise OSError(errno.EXDEV, f"that process is on {machine}, this one on {this_machine()}")
        return cls(like, device, SharedMemory.open(process, file))

    @property
    def place(self) -> Place:
        return this_machine(), os.getpid(), self._memory.file


def pin(memory: Tensor) -> None:
    """Pins `memory` by the CUDA driver until this process ends. It must be contiguous and not allocated by torch."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))  # type: ignore[no-untyped-call, unused-ignore]
    if status:
        raise RuntimeError(
            f"CUDA could not pin {memory.numel()} bytes on the host (cudaHostRegister returned {status}). Check the "
            "free memory of the host and the limit on locked memory of this container"
        )


# Host copies shared by the ranks of a node with equal content.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeCopy:
    """One host copy of `what` for the `ranks` of a node with equal content. The first rank owns the memory.

    `what` is a description in words.
    """

    job_store: JobStore
    what: str
    ranks: tuple[int, ...]
    """Ascending ranks, including this one."""

    @classmethod
    def among(cls, job_store: JobStore, what: str, ranks: Sequence[int], parts: Sequence[int]) -> Self:
        """Returns the copy for those of `ranks` on this node with the same part of a layout as this rank."""
        world = job_store.world
        return cls(job_store, what, equals_on_node(ranks, parts, world.rank, world.ranks_per_node))

    @property
    def is_first(self) -> bool:
        return self.job_store.world.rank == self.ranks[0]

    def tensors(self, like: Mapping[str, Tensor], fill: Callable[[HostTensors], None]) -> HostTensors:
        """Returns shared memory for tensors with the shapes and dtypes of `like`. The first rank fills it by `fill`.

        A rank without access to the first rank's memory gets separate memory and calls `fill` itself.
        """
        device, first = self.job_store.world.device, self.ranks[0]
        if not self.is_first:
            place = self.job_store.get(self._key("place"), f"rank {first} to allocate {self.what} on this node")
            try:
                return HostTensors.of_another(place, like, device)
            except OSError as error:  # for example in another container
                mine = self.job_store.world.rank
                logger.warning("rank %d cannot share %s of rank %d: %s", mine, self.what, first, error)
        host = HostTensors(like, device)
        fill(host)
        if self.is_first and len(self.ranks) > 1:
            self.job_store.put(self._key("place"), host.place)
        return host

    def renewed(self, count: int) -> None:
        """Reports that the first rank has written all of its memory for the `count`th time, counted from 1.

        The other ranks must have finished reading the previous content.
        """
        if len(self.ranks) > 1:
            self.job_store.put(self._key(count), True)
            self.job_store.forget(self._key(count - 1))

    def await_renewed(self, count: int) -> None:
        """Waits until the first rank has reported its `count`th write."""
        first = self.ranks[0]
        self.job_store.get(self._key(count), f"rank {first} to write {self.what} for the {count}th time")

    def _key(self, of: str | int) -> str:
        return f"node_copy/{self.what}/{self.ranks[0]}/{of}"


def equals_on_node(ranks: Sequence[int], parts: Sequence[int], rank: int, ranks_per_node: int) -> tuple[int, ...]:
    """Returns the ascending `ranks` on the node of `rank` with the same part of a layout as `rank`."""
    part = parts[ranks.index(rank)]
    equal = (peer for peer, its in zip(ranks, parts, strict=True) if its == part)
    return tuple(sorted(peer for peer in equal if peer // ranks_per_node == rank // ranks_per_node))
