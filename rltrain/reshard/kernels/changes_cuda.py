"""Changes of packed bytes on NVIDIA GPUs by csrc/reshard_cuda_delta.h."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array
from rltrain.reshard.kernels import native
from rltrain.reshard.kernels.changes_torch import block_sizes, totals_of
from rltrain.reshard.kernels.delta_format import BLOCK, WHOLE

if TYPE_CHECKING:
    from rltrain.reshard.kernels.changes import Extent, Marks, Packing

_ADDRESS, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_WHERE = (_NUMBER, _NUMBER, _ADDRESS)  # blocks, device, stream
LANES = 32


class CudaChanges:
    """A `Changes` (changes.py), by launches on the current stream of `device`. The host waits for what it must know."""

    keeps_as_it_marks = packs = False

    def __init__(self, device: torch.device) -> None:
        library = native.cuda_library()
        self._mark = _typed(library.rs_cuda_delta_mark, _ADDRESS, _ADDRESS, _SIZE, _NUMBER, _ADDRESS, _ADDRESS)
        self._write = _typed(library.rs_cuda_delta_write, _ADDRESS, _ADDRESS, _SIZE, _NUMBER, *(_ADDRESS,) * 6)
        self._apply = _typed(
            library.rs_cuda_delta_apply, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _NUMBER, *(_ADDRESS,) * 6
        )
        self._error_string = library.rs_cuda_error_string
        self._error_string.restype = ctypes.c_char_p
        self._ordinal = self._ordinal_of(device)
        self._num_blocks = int(library.rs_cuda_num_blocks(self._ordinal))

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: "Packing | None" = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        elements = packed.numel() // item
        sizes = block_sizes(elements, packed.device)
        marks = torch.empty(len(sizes) * LANES, dtype=torch.uint8, device=packed.device)
        counts = torch.zeros(len(sizes), dtype=torch.int32, device=packed.device)
        tensors = packed.data_ptr(), kept.data_ptr(), elements, item, marks.data_ptr(), counts.data_ptr()
        self._launch(self._mark, *tensors)
        whole = (counts > 0) & (counts * (item + 1) >= sizes * item)
        lengths = torch.where(whole, WHOLE, counts).to(torch.uint8)
        return lengths, marks, totals_of(counts.to(torch.int64), whole, sizes)

    def write(self, packed: Tensor, kept: Tensor, marks: "Marks", parts: tuple[Tensor, Tensor, Tensor]) -> None:
        lengths, places, values = parts
        lengths.copy_(marks.lengths)
        starts = _starts(marks.lengths, marks.extent.elements)
        tensors = (marks.bits, marks.lengths, *starts, places, values)
        pointers = [tensor.data_ptr() for tensor in tensors]
        extent = marks.extent
        self._launch(self._write, packed.data_ptr(), kept.data_ptr(), extent.elements, extent.item, *pointers)

    def apply(
        self, slices: Array, begin: int, extent: "Extent", parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        lengths, places, values = parts
        starts, device = _starts(lengths, extent.elements), lengths.device
        ends = [int(made[-1]) for made in _totals(lengths, extent.elements)]
        if ends != [extent.places, extent.values]:
            return False
        table = torch.from_numpy(np.ascontiguousarray(slices).view(np.uint8)).to(device)
        addresses = np.array([base.data_ptr() for base in bases], dtype=np.uint64)
        pointers = torch.from_numpy(addresses.view(np.int64)).to(device)
        wrong = torch.zeros(1, dtype=torch.int32, device=device)
        where = table.data_ptr(), len(slices), pointers.data_ptr(), begin, extent.elements, extent.item
        tensors = (lengths, places, *starts, values, wrong)
        self._launch(self._apply, *where, *[tensor.data_ptr() for tensor in tensors])
        return not bool(wrong.item())

    def _launch(self, kernel: Callable[..., int], *arguments: int) -> None:
        with self._current_stream() as stream:
            error = kernel(*arguments, self._num_blocks, self._ordinal, stream)
        if error:
            reason = f"{self._error_string(error).decode()} (CUDA error {error})"
            raise RuntimeError(f"what was packed cannot be compared on device {self._ordinal}: {reason}")

    def _ordinal_of(self, device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        with torch.cuda.device(self._ordinal):
            yield torch.cuda.current_stream().cuda_stream


def _totals(lengths: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """[blocks] each: places and values up to the end of each block."""
    whole, counts = lengths == WHOLE, lengths.to(torch.int64)
    places = counts.masked_fill(whole, 0)
    values = torch.where(whole, block_sizes(elements, lengths.device), counts)
    return places.cumsum(0), values.cumsum(0)


def _starts(lengths: Tensor, elements: int) -> list[Tensor]:
    """[blocks] each: the first place and the first value of each block."""
    return [torch.nn.functional.pad(ends, (1, -1)) for ends in _totals(lengths, elements)]


def _typed(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    function.argtypes = (*arguments, *_WHERE)  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


assert BLOCK == LANES * 8, "a lane marks its elements in a byte"
