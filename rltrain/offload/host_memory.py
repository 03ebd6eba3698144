"""Memory on the host: for what leaves the device, shared by processes of a node, or one copy for a node."""

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

# Host memory that what leaves the device is copied to: allocated once, reused at every move, pinned beside CUDA.

SLAB_BYTES = 256 * 2**20
"""Pinned memory comes in powers of two from torch's allocator: one large buffer would waste up to half of itself."""
SMALLEST_SLAB_BYTES = 2**20
ALIGNMENT_BYTES = 64


class HostRegion:
    """A growing range of bytes on the host, in slabs that keep their address for good."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.slabs: list[Tensor] = []
        """uint8, end to end the bytes of the region."""

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() for slab in self.slabs)

    def reserve(self, num_bytes: int) -> None:
        """Have at least `num_bytes`, keeping what is there."""
        while (missing := num_bytes - self.num_bytes) > 0:
            self.slabs.append(torch.empty(self._slab_bytes(missing), dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, begin: int, num_bytes: int) -> Iterator[Tensor]:
        """Bytes `begin` to `begin + num_bytes`, in order; ValueError where they were not reserved."""
        if begin < 0 or begin + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {begin} to {begin + num_bytes} of a host region of {self.num_bytes}")
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
    """The next multiple of the alignment at which every storage starts in a region."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Tensors on the host in one range of memory, which processes of a node share and CUDA copies from.

PORTABLE = 1
"""For cudaHostRegister: pinned for whatever device copies from it."""

Place = tuple[str, int, int]
"""Machine, process and number of an open file there."""


class HostTensors:
    """Tensors of the shapes and types of `like`, end to end, in memory of the system's own; zero to begin with.

    Beside CUDA it is pinned where it lies: torch's allocator would round every tensor up to a power of two, and its
    memory is no other process's. `memory` is that of a process that has the same and fills it. Stays for as long
    as this process lives.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device, memory: SharedMemory | None = None) -> None:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in like.items()}
        num_bytes = sum(map(aligned, sizes.values()))
        self.is_own = memory is None
        self._memory = memory or SharedMemory.create()
        if self.is_own:
            self._memory.resize(num_bytes)
        elif self._memory.num_bytes != num_bytes:
            raise ValueError(f"shared memory of {self._memory.num_bytes} bytes for tensors of {num_bytes}")
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
        """What another process has full at `place`. OSError where that cannot be reached from here."""
        machine, process, file = place
        if machine != this_machine():
            raise OSError(errno.EXDEV, f"it is a process of {machine}, and this one of {this_machine()}")
        return cls(like, device, SharedMemory.open(process, file))

    @property
    def place(self) -> Place:
        return this_machine(), os.getpid(), self._memory.file


def pin(memory: Tensor) -> None:
    """Have the CUDA driver pin `memory`, contiguous and not torch's own, until this process ends."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))  # type: ignore[no-untyped-call, unused-ignore]
    if status:
        raise RuntimeError(
            f"CUDA could not pin {memory.numel()} bytes on the host (cudaHostRegister returned {status}): is there as "
            "much, and may this container lock it?"
        )


# What is equal on several ranks of a node, kept on the host by one of them for all.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeCopy:
    """Of `what`, in words, on the `ranks` of a node that have it in common: the first one's memory is everybody's."""

    job_store: JobStore
    what: str
    ranks: tuple[int, ...]
    """Ascending; this one among them."""

    @classmethod
    def among(cls, job_store: JobStore, what: str, ranks: Sequence[int], parts: Sequence[int]) -> Self:
        """Those of `ranks` on this rank's node whose part of a layout, in `parts`, is the same as this rank's."""
        world = job_store.world
        return cls(job_store, what, equals_on_node(ranks, parts, world.rank, world.ranks_per_node))

    @property
    def is_first(self) -> bool:
        return self.job_store.world.rank == self.ranks[0]

    def tensors(self, like: Mapping[str, Tensor], fill: Callable[[HostTensors], None]) -> HostTensors:
        """Memory for tensors of the shapes and types of `like`: what the first rank gave to `fill`; this rank's own,
        given to `fill` here, where the first one's cannot be reached from here."""
        device, first = self.job_store.world.device, self.ranks[0]
        if not self.is_first:
            place = self.job_store.get(self._key("place"), f"rank {first} to make room for {self.what} on this node")
            try:
                return HostTensors.of_another(place, like, device)
            except OSError as error:  # in a container of its own, say
                mine = self.job_store.world.rank
                logger.warning("rank %d cannot share %s of rank %d: %s", mine, self.what, first, error)
        host = HostTensors(like, device)
        fill(host)
        if self.is_first and len(self.ranks) > 1:
            self.job_store.put(self._key("place"), host.place)
        return host

    def renewed(self, count: int) -> None:
        """The first rank has written all of its memory for the `count`th time, from 1 on; the others have done with
        what it had before."""
        if len(self.ranks) > 1:
            self.job_store.put(self._key(count), True)
            self.job_store.forget(self._key(count - 1))

    def await_renewed(self, count: int) -> None:
        """Until the first rank has said so."""
        first = self.ranks[0]
        self.job_store.get(self._key(count), f"rank {first} to have all of {self.what}, for the {count}th time")

    def _key(self, of: str | int) -> str:
        return f"node_copy/{self.what}/{self.ranks[0]}/{of}"


def equals_on_node(ranks: Sequence[int], parts: Sequence[int], rank: int, ranks_per_node: int) -> tuple[int, ...]:
    """Those of `ranks` on the node of `rank` whose part of a layout is the same as that of `rank`, ascending."""
    part = parts[ranks.index(rank)]
    equal = (peer for peer, its in zip(ranks, parts, strict=True) if its == part)
    return tuple(sorted(peer for peer in equal if peer // ranks_per_node == rank // ranks_per_node))
