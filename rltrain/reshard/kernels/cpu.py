"""Copies of slices on the CPU by csrc/reshard_cpu.cpp."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from rltrain.models.table import Array
from rltrain.reshard.kernels import native
from rltrain.reshard.kernels.slices import SLICE

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)


class CpuCopies:
    """A `NativeCopies` (copy_table.py). It uses as many threads as torch does at the time of a launch."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        self._slices = slices
        self._table = slices.ctypes.data
        self._bases = np.zeros(0, dtype=np.uint64)
        self._pointers = 0
        library = native.cpu_library()
        self._copy = _typed(library.rs_cpu_copy)
        self._amax = _typed(library.rs_cpu_amax)
        self._checksum = _typed(library.rs_cpu_checksum)

    def bind(self, pointers: list[int]) -> None:
        self._bases = np.array(pointers, dtype=np.uint64)
        self._pointers = self._bases.ctypes.data

    def launch(self, first: int, last: int) -> None:
        self._run(self._copy, first, last)

    def amax(self, first: int, last: int) -> None:
        self._run(self._amax, first, last)

    def checksum(self, first: int, last: int) -> None:
        self._run(self._checksum, first, last)

    def addresses(self, first: int, last: int) -> tuple[int, int, int]:
        """See `CopyTable.addresses`."""
        return self._table + first * SLICE.itemsize, last - first, self._pointers

    def _run(self, function: Callable[[int, int, int, int], int], first: int, last: int) -> None:
        if function(*self.addresses(first, last), torch.get_num_threads()):
            raise RuntimeError(f"the native library could not go through slices {first}:{last}: out of memory")


def _typed(function: Callable[..., int]) -> Callable[[int, int, int, int], int]:
    function.argtypes = _ARGUMENTS  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
