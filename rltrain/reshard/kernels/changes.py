"""What changed of packed bytes since they were sent last: found, encoded and applied (csrc/reshard_delta.h)."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array
from rltrain.reshard.kernels import native
from rltrain.reshard.kernels.changes_torch import TorchChanges
from rltrain.reshard.kernels.copy_table import CopyTable
from rltrain.reshard.kernels.delta_format import BLOCK
from rltrain.reshard.kernels.slices import SLICE

ALIGNMENT = 16
"""Bytes: where each of the arrays of an encoded section begins."""


def rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """What is encoded of a section of `elements` of `item` bytes: numbers of places and of values."""

    elements: int
    item: int
    places: int
    values: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of lengths, places and values, to the next multiple of ALIGNMENT; nothing where nothing changed."""
        if not self.values:
            return 0, 0, 0
        blocks = -(-self.elements // BLOCK)
        return rounded_up(blocks), rounded_up(self.places), rounded_up(self.values * self.item)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def parts(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths, places and values within `encoded`, bytes that begin with them."""
        lengths, places, _ = self.sizes
        blocks = -(-self.elements // BLOCK)
        return (
            encoded[:blocks],
            encoded[lengths : lengths + self.places],
            encoded[lengths + places : lengths + places + self.values * self.item],
        )


@dataclass(frozen=True, eq=False)
class Marks:
    """What of a section differs, `changed` elements: `lengths` [blocks] uint8 as they are encoded, and `bits`, which
    the implementation that made them understands, until it makes others of the same item size."""

    extent: Extent
    changed: int
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Slices `first:last` of `table` pack a section, which begins at element `begin` of their destination."""

    table: CopyTable
    first: int
    last: int
    begin: int


class Changes(Protocol):
    """An implementation. All tensors are contiguous bytes on one device; sections begin at multiples of their items."""

    keeps_as_it_marks: bool
    """Whether `mark` has `kept` equal `packed` already."""
    packs: bool
    """Whether `mark` takes a `packing`."""

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """(lengths, bits, [places, values, changes]) of what differs, in elements of `item` bytes. `packing` makes
        `packed` on the way; without it is made already."""

    def write(self, packed: Tensor, kept: Tensor, marks: Marks, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        """Encode what was marked into `parts`, and have `kept` equal `packed`, neither of which was written since."""

    def apply(
        self, slices: Array, begin: int, extent: Extent, parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        """Put values where `slices` [SLICE] have their elements go, whose sources lie one after another; element
        `begin` of their source is the section's first. False where they do not fit."""


class NativeChanges:
    """By csrc/reshard_cpu_delta.h, with as many threads as torch has. Marks of one item size are those made last."""

    keeps_as_it_marks = packs = True

    def __init__(self) -> None:
        library = native.cpu_library()
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._counts = library.rs_cpu_delta_counts
        self._counts.argtypes, self._counts.restype = (size,), size
        self._mark, self._gather, self._apply = (
            library.rs_cpu_delta_mark,
            library.rs_cpu_delta_gather,
            library.rs_cpu_delta_apply,
        )
        self._mark.argtypes = (address, size, address, size, *(address,) * 2, size, number, *(address,) * 3, number)
        self._gather.argtypes, self._gather.restype = (address, address, size, number, *(address,) * 3), None
        self._apply.argtypes = (address, size, address, size, size, number, *(address,) * 4, number)
        self._found: dict[int, Tensor] = {}

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        elements = packed.numel() // item
        lengths = torch.empty(-(-elements // BLOCK), dtype=torch.uint8)
        counts = torch.empty(self._counts(elements * item), dtype=torch.int64)
        found = self._room(elements * (item + 1), item)
        slices = (0, 0, 0, 0)
        if packing is not None:
            slices = (*packing.table.addresses(packing.first, packing.last), packing.begin)
        pointers = packed.data_ptr(), kept.data_ptr(), elements, item, found.data_ptr(), lengths.data_ptr()
        _expect_memory(self._mark(*slices, *pointers, counts.data_ptr(), torch.get_num_threads()))
        totals: list[int] = counts.view(-1, 3).sum(0).tolist()
        return lengths, found, totals

    def write(self, packed: Tensor, kept: Tensor, marks: Marks, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        lengths, places, values = parts
        lengths.copy_(marks.lengths)
        extent = marks.extent
        pointers = [tensor.data_ptr() for tensor in (lengths, places, values)]
        self._gather(packed.data_ptr(), marks.bits.data_ptr(), extent.elements, extent.item, *pointers)

    def _room(self, num_bytes: int, item: int) -> Tensor:
        """Memory for what is found, of which only what is found is touched."""
        if item not in self._found or self._found[item].numel() < num_bytes:
            self._found[item] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._found[item]

    def apply(
        self, slices: Array, begin: int, extent: Extent, parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        assert slices.dtype == SLICE and slices.flags.c_contiguous
        addresses = np.array([tensor.data_ptr() for tensor in bases], dtype=np.uint64)
        totals = np.array([extent.places, extent.values], dtype=np.int64)
        pointers = [tensor.data_ptr() for tensor in parts]
        error = self._apply(
            slices.ctypes.data,
            len(slices),
            addresses.ctypes.data,
            begin,
            extent.elements,
            extent.item,
            *pointers,
            totals.ctypes.data,
            torch.get_num_threads(),
        )
        _expect_memory(int(error == 1))
        return bool(error == 0)


def _expect_memory(error: int) -> None:
    if error:
        raise RuntimeError("the native library could not compare what was packed: out of memory")


def changes_on(device: torch.device) -> Changes:
    """What finds changes on `device`: all implementations give the same bytes. UserError as `native.backend`."""
    match native.backend(device.type):
        case "cuda":
            from rltrain.reshard.kernels.changes_cuda import CudaChanges  # only where there is a device to use it

            return CudaChanges(device)
        case "native":
            return NativeChanges()
    return TorchChanges()


def mark(changes: Changes, packed: Tensor, kept: Tensor, item: int, packing: Packing | None = None) -> Marks:
    """What of `packed` differs from `kept`, by elements of `item` bytes."""
    lengths, bits, (places, values, changed) = changes.mark(packed, kept, item, packing)
    return Marks(Extent(packed.numel() // item, item, places, values), changed, lengths, bits)
