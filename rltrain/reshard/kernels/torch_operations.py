"""Copies of slices by torch operations, one slice at a time: where no native library was built, and the reference that
the native ones equal bit for bit."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard.kernels.keyed_sum import MAX_ELEMENTS, bits_of, keyed_sum
from rltrain.reshard.kernels.quantize import block_amax, inverse_scales_of, per_element, quantize_elements
from rltrain.reshard.kernels.slices import blocks_spanned, is_empty, quantises
from rltrain.reshard.kernels.torch_types import DTYPES

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# torch's own NaNs differ between its vectorised and scalar code, and between CPUs and GPUs (csrc/reshard.h).
_NANS = {ElementType.FLOAT32: 0x7FFFFFFF, ElementType.BFLOAT16: 0x7FFF, ElementType.FLOAT16: 0x7FFF}


class TorchCopies:
    """As `NativeCopies` (copy_table.py), on tensors instead of addresses."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        self._slices = slices
        self._quantises = quantises(slices)
        self._empty = is_empty(slices)
        self._tensors: Sequence[Tensor] = ()

    def bind_tensors(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]

    @torch.no_grad()
    def launch(self, first: int, last: int) -> None:
        for number in first + np.flatnonzero(~self._empty[first:last]):
            self._copy(self._slices[number], quantised=bool(self._quantises[number]))

    @torch.no_grad()
    def amax(self, first: int, last: int) -> None:
        for number in first + np.flatnonzero(self._quantises[first:last] & ~self._empty[first:last]):
            self._raise_amax(self._slices[number])

    @torch.no_grad()
    def checksum(self, first: int, last: int) -> None:
        for number in first + np.flatnonzero(~self._empty[first:last]):
            self._add_checksum(self._slices[number])

    def _add_checksum(self, summed: np.void) -> None:
        sums = self._as(int(summed["amax_base"]), torch.int64)
        source, place, width = self._box(summed, "src"), int(summed["dst_offset"]), int(summed["dst_stride"])
        for row in range(0, len(source), step := max(MAX_ELEMENTS // source.shape[1], 1)):
            for col in range(0, source.shape[1], MAX_ELEMENTS):
                part = bits_of(source[row : row + step, col : col + MAX_ELEMENTS], exact=not summed["row_phase"])
                sums[int(summed["amax_offset"])] += keyed_sum(part, place + row * width + col, width)

    def _copy(self, copy: np.void, *, quantised: bool) -> None:
        source, destination = self._box(copy, "src"), self._box(copy, "dst")
        source_type, destination_type = ElementType(copy["src_type"]), ElementType(copy["dst_type"])
        if quantised:
            phases = {"row_phase": int(copy["row_phase"]), "col_phase": int(copy["col_phase"])}
            inverse = per_element(inverse_scales_of(self._amax_entries(copy)), source.shape, **phases)
            destination.copy_(quantize_elements(source, inverse))
        elif source_type == destination_type:
            # As bits: a copy of floats may quieten a NaN.
            self._box(copy, "dst", as_bits=True).copy_(self._box(copy, "src", as_bits=True))
        else:
            destination.copy_(source)
            if source_type != ElementType.BFLOAT16:  # to float32 it is a shift, which keeps a NaN's bits everywhere
                self._box(copy, "dst", as_bits=True).masked_fill_(source.isnan(), _NANS[destination_type])

    def _raise_amax(self, copy: np.void) -> None:
        above, left = int(copy["row_phase"]), int(copy["col_phase"])
        part = block_amax(torch.nn.functional.pad(self._box(copy, "src"), (left, 0, above, 0)))
        entries = self._amax_entries(copy)
        # Compared as integers, which order as the magnitudes do, NaN above all.
        entries.view(torch.int32).copy_(torch.maximum(entries.view(torch.int32), part.view(torch.int32)))

    def _amax_entries(self, copy: np.void) -> Tensor:
        rows, cols = (int(blocks_spanned(copy[f"{axis}_phase"], copy[f"{axis}s"])) for axis in ("row", "col"))
        floats = self._as(int(copy["amax_base"]), torch.float32)
        return floats[int(copy["amax_offset"]) :].as_strided((rows, cols), (int(copy["amax_stride"]), 1))

    def _box(self, copy: np.void, side: str, *, as_bits: bool = False) -> Tensor:
        """The slice's elements in the memory of a side, [rows, cols]."""
        dtype = DTYPES[ElementType(copy[f"{side}_type"])]
        elements = self._as(int(copy[f"{side}_base"]), _BITS[dtype.itemsize] if as_bits else dtype)
        # Sliced first: as_strided's own offset would count from the storage, which may hold other tensors before.
        start, stride = int(copy[f"{side}_offset"]), int(copy[f"{side}_stride"])
        return elements[start:].as_strided((int(copy["rows"]), int(copy["cols"])), (stride, 1))

    def _as(self, base: int, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors[base]
        return tensor[: tensor.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
