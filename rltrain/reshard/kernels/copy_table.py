"""Copies of many strided two-dimensional slices in one call, with casts and FP8 quantisation on the way.

A `CopyTable` is made once from descriptors [SLICE]; memory is given to it by `bind`, so that the table outlives the
tensors. What carries it out is chosen per device by `native.backend`: CUDA kernels, native CPU code, or torch
operations where neither was built. All give the same bits, as csrc/reshard.h says.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array
from rltrain.reshard.kernels import native
from rltrain.reshard.kernels.cpu import CpuCopies
from rltrain.reshard.kernels.slices import ANY_TYPE, BLOCK, SLICE, Bases, alignment, check_bounds, check_slices
from rltrain.reshard.kernels.torch_operations import TorchCopies
from rltrain.reshard.kernels.torch_types import DTYPES

__all__ = ["BLOCK", "SLICE", "CopyTable", "NativeCopies"]

_TYPES: dict[torch.dtype, int] = {dtype: kind for kind, dtype in DTYPES.items()} | {torch.uint8: ANY_TYPE}


class NativeCopies(Protocol):
    """A backend that works on addresses, `CpuCopies` or `CudaCopies` (cuda.py). What it is given was checked."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        """`slices` [SLICE] is contiguous and belongs to the backend. CUDA: uploads the table to `device`."""

    def bind(self, pointers: list[int]) -> None:
        """Number i is the address of base i on the device; bases without elements have address 0."""

    def launch(self, first: int, last: int) -> None:
        """Copy slices[first:last], 0 <= first < last <= len(slices), in one call. CUDA: on the current stream."""

    def amax(self, first: int, last: int) -> None:
        """Raise the amax entries of those of slices[first:last] that quantise to the magnitudes of their elements; the
        other slices are skipped."""

    def checksum(self, first: int, last: int) -> None:
        """Add the checksums of slices[first:last], which have no destination, to their sums: see checksums.py."""


class CopyTable:
    """Copies between the tensors last bound, as `slices` [SLICE] say; `device` is where all of them are.

    Raises ValueError where a slice is wrong in itself: a pair of types that cannot be copied, a negative offset, rows
    that overlap in the destination. Different slices must not write the same elements, which is not checked.
    """

    def __init__(self, slices: Array, device: torch.device) -> None:
        check_slices(slices)
        self.num_launches = 0
        self._slices = np.ascontiguousarray(slices).copy()
        self._device = device
        self._bound: list[Tensor] | None = None
        self._checked: list[tuple[torch.dtype, int]] | None = None
        self._alignment: list[int] = []
        self._copies = backend_class(device)(self._slices, device)

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Number i becomes base i: contiguous, of any shape, in memory that the table's device can address.

        Its dtype is that of the slices that name it; a uint8 tensor serves every type. Only addresses are read again
        when the tensors have the dtypes and sizes of those bound before. They are kept alive until other ones are bound
        or until `release`. Raises ValueError, naming slice and base, where a slice leaves its base or meets another
        type there.
        """
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        if sizes != self._checked:
            self._check(sizes)
        pointers = [tensor.data_ptr() for tensor in tensors]
        for number, tensor in enumerate(tensors):
            if not tensor.is_contiguous() or not self._reaches(tensor):
                raise ValueError(
                    f"base {number} is on {tensor.device} with strides {tensor.stride()}: expected a contiguous tensor "
                    f"on {self._device}"
                )
            if pointers[number] % self._alignment[number]:
                raise ValueError(f"base {number} begins between two elements of {self._alignment[number]} bytes")
        if isinstance(self._copies, TorchCopies):
            self._copies.bind_tensors(tensors)
        else:
            self._copies.bind(pointers)
        self._bound = list(tensors)

    def _reaches(self, tensor: Tensor) -> bool:
        """Whether the table's device can address it: CUDA devices reach pinned memory of the host as well."""
        same = tensor.device.type == self._device.type
        return same or (self._device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned())

    def release(self) -> None:
        """Forget the tensors, so that their memory can be freed; nothing can be launched until the next `bind`."""
        self._bound = None
        if isinstance(self._copies, TorchCopies):
            self._copies.bind_tensors(())

    def launch(self, first: int, last: int) -> None:
        """Copy slices[first:last] in one call: on CUDA on the device's current stream, on the CPU before it returns."""
        if self._begin(first, last):
            self._copies.launch(first, last)

    def amax(self, first: int, last: int) -> None:
        """Raise the amax entries of the slices[first:last] that quantise to the largest magnitude of their elements.

        An entry is the larger of itself and the slice's part of the block, so that several slices can share a block;
        zero the table before. A block with a NaN gets a NaN. Bits of amax entries order as the integers: a reduction
        over ranks must be one of int32 views, since a float maximum may drop NaN.
        """
        if self._begin(first, last):
            self._copies.amax(first, last)

    def addresses(self, first: int, last: int) -> tuple[int, int, int]:
        """Of slices[first:last], their number, and of the addresses of bases, for native code on the CPU that goes
        through them itself; counts as a launch."""
        assert isinstance(self._copies, CpuCopies), "there is native code for CPUs"
        self._begin(first, last)
        return self._copies.addresses(first, last)

    def _begin(self, first: int, last: int) -> bool:
        """Whether there is anything to do, which then counts as a launch."""
        if self._bound is None:
            raise RuntimeError("no tensors are bound to this table: call bind before launch and amax")
        if not 0 <= first <= last <= len(self._slices):
            raise ValueError(f"slices {first}:{last} of a table of {len(self._slices)}")
        self.num_launches += last > first
        return last > first

    def _check(self, sizes: list[tuple[torch.dtype, int]]) -> None:
        self._bound = self._checked = None
        for number, (dtype, _) in enumerate(sizes):
            if dtype not in _TYPES:
                raise ValueError(f"base {number} has dtype {dtype}: expected one of {[str(dtype) for dtype in _TYPES]}")
        types = np.array([_TYPES[dtype] for dtype, _ in sizes], dtype=np.int64)
        num_bytes = np.array([dtype.itemsize * size for dtype, size in sizes], dtype=np.int64)
        check_bounds(self._slices, Bases(types, num_bytes))
        self._alignment = alignment(self._slices, len(sizes)).tolist()
        self._checked = sizes


def backend_class(device: torch.device) -> type[NativeCopies] | type[TorchCopies]:
    """What goes through slices on `device`. UserError as `native.backend`."""
    match native.backend(device.type):
        case "cuda":
            from rltrain.reshard.kernels.cuda import CudaCopies  # only where there is a device to use it

            return CudaCopies
        case "native":
            return CpuCopies
    return TorchCopies
