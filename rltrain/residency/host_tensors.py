"""Tensors on the host in one range of memory, which processes of a node share and CUDA copies from."""

import errno
import os
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from rltrain.residency.host_memory import aligned
from rltrain.runtime.machine import this_machine
from rltrain.runtime.shared_memory import SharedMemory

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
