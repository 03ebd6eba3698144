"""Memory of this rank that the process of an SGLang server can map: weights lie here between reshard and engine.

It comes from the operating system or the CUDA driver and not from torch's allocator, so that what the server is told
depends on no version of torch and on no setting of its allocator. It is gone with the last process that has it open,
however that ends.
"""

import ctypes
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import EngineError
from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.runtime.shared_memory import SharedMemory

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2
"""One is filled while the engine reads the other."""

IPC_HANDLE_BYTES = 64
DEVICE_PAGE_BYTES = 2**21
"""The driver shares memory by pages of this size: a segment has its own, so that nothing else is shared with it."""


class HostSegment:
    """Has shared memory of the host, `bytes` uint8, which another process of this node can map as `handle` says."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = SharedMemory.create()
        self._memory.resize(num_bytes)
        self.bytes = self._memory.map()
        self.handle = {"kind": "file", "id": secrets.token_hex(16), "path": self._memory.path, "bytes": num_bytes}

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


class DeviceSegment:
    """Has memory of the CUDA driver, as HostSegment has of the host, exported by an inter-process handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = -(-num_bytes // DEVICE_PAGE_BYTES) * DEVICE_PAGE_BYTES
        self._device = device
        self._pointer = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            driver("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(num_bytes))
            exported = (ctypes.c_char * IPC_HANDLE_BYTES)()
            driver("cuIpcGetMemHandle", ctypes.byref(exported), self._pointer)
            self.bytes = torch.as_tensor(_CudaArray(int(self._pointer.value), num_bytes), device=device)
        self.handle = {
            "kind": "cuda",
            "id": secrets.token_hex(16),
            "handle": bytes(exported).hex(),
            "device": str(torch.cuda.get_device_properties(device).uuid),
            "bytes": num_bytes,
        }

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            driver("cuMemFree_v2", self._pointer)


class _CudaArray:
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def driver(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver; EngineError where it fails."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if status:
        raise EngineError(
            f"{function} of the CUDA driver returned error {status} while staging memory for an SGLang engine was set "
            "up; expected 0. Is the device out of memory (rollout.sglang.staging_mb), or does this container forbid "
            "CUDA's inter-process memory?"
        )


@dataclass(frozen=True)
class Field:
    """A parameter in a slot: from byte `offset`. `padded`: some of its elements are padding, in no piece."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    padded: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def fields_of(layout: Layout, rank: int) -> tuple[Field, ...]:
    """The parameters of `rank`, one after another."""
    share = layout.parts[layout.ranks.index(rank)]
    on = layout.part(share)
    covered = np.zeros(len(on.parameters), dtype=np.int64)
    np.add.at(covered, on.pieces["parameter"], on.pieces["rows"] * on.pieces["cols"])
    fields, offset = [], 0
    types = parameter_types(layout, share).tolist()
    for (name, shape), kind, held in zip(on.parameters, types, covered.tolist(), strict=True):
        field = Field(name, shape, DTYPES[ElementType(kind)], offset, padded=held < int(np.prod(shape)))
        fields.append(field)
        offset += -(-field.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(fields)


class Staging:
    """Two slots; part i of the weights passes through slot i % 2. `parts` are layouts of some parameters each."""

    def __init__(self, parts: Sequence[Layout], rank: int, device: torch.device) -> None:
        self.fields = tuple(fields_of(part, rank) for part in parts)
        num_bytes = max([1, *(self.num_bytes(part) for part in range(len(parts)))])
        self._slots: list[HostSegment | DeviceSegment] = [
            DeviceSegment(num_bytes, device) if device.type == "cuda" else HostSegment(num_bytes)
            for _ in range(min(NUM_SLOTS, len(parts)))
        ]

    def num_bytes(self, part: int) -> int:
        fields = self.fields[part]
        return fields[-1].offset + fields[-1].num_bytes if fields else 0

    def slot(self, part: int) -> int:
        return part % len(self._slots)

    def bytes(self, part: int) -> Tensor:
        """uint8 [num_bytes(part)]: the slot as far as the part fills it."""
        return self._slots[self.slot(part)].bytes[: self.num_bytes(part)]

    def views(self, part: int) -> Mapping[str, Tensor]:
        """The part's parameters, by name, in its slot."""
        memory = self.bytes(part)
        return {
            field.name: memory[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
            for field in self.fields[part]
        }

    def clear_padding(self, part: int) -> None:
        """Zero every parameter of the part that pieces do not fill: the slot has other weights in these places."""
        memory = self.bytes(part)
        for field in self.fields[part]:
            if field.padded:
                memory[field.offset : field.offset + field.num_bytes].zero_()

    def handle(self, part: int) -> dict[str, Any]:
        """How the engine's process maps the part's slot: values that JSON has."""
        return self._slots[self.slot(part)].handle

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []
