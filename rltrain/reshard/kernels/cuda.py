"""Copies of slices on NVIDIA GPUs by csrc/reshard_cuda.cu."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import Array
from rltrain.reshard.kernels import native
from rltrain.reshard.kernels.tiles import TILE, cut

_ARGUMENTS = (
    ctypes.c_void_p,  # tiles
    ctypes.c_void_p,  # slices
    ctypes.c_void_p,  # bases
    ctypes.c_int64,  # first tile
    ctypes.c_int64,  # last tile
    ctypes.c_int,  # blocks
    ctypes.c_int,  # device
    ctypes.c_void_p,  # stream
)
_Kernel = Callable[[int, int, int, int, int, int, int, int], int]

assert TILE.itemsize == native.CUDA_TILE_BYTES


class CudaCopies:
    """A `NativeCopies` (copy_table.py). Launches are asynchronous, on the current stream of the device.

    Set `num_blocks` lower to leave multiprocessors, of which two blocks fill one, to what runs beside a launch.
    """

    def __init__(self, slices: Array, device: torch.device) -> None:
        library = native.cuda_library()
        self._copy = _typed(library.rs_cuda_copy)
        self._amax = _typed(library.rs_cuda_amax)
        self._checksum = _typed(library.rs_cuda_checksum)
        self._error_string = library.rs_cuda_error_string
        self._error_string.restype = ctypes.c_char_p
        self._device = device
        self._ordinal = self._ordinal_of(device)
        self.num_blocks = int(library.rs_cuda_num_blocks(self._ordinal))
        if self.num_blocks < 0:
            raise RuntimeError(f"no multiprocessors of {device} can be counted: {self._reason(-self.num_blocks)}")
        tiles = cut(slices)
        self._first_tile = tiles.first_tile
        self._slices = self._upload(tiles.slices)
        self._tiles = self._upload(tiles.tiles)
        self._pointers: list[int] = []
        self._bases = self._upload(np.zeros(0, dtype=np.uint64))
        self._streams: set[int] = set()

    def bind(self, pointers: list[int]) -> None:
        if pointers == self._pointers:
            return
        # A new table: launches under way read the former one, whose memory is not reused before they have ended.
        self._bases = self._upload(np.array(pointers, dtype=np.uint64))
        self._streams.clear()
        self._pointers = list(pointers)

    def launch(self, first: int, last: int) -> None:
        self._run(self._copy, first, last)

    def amax(self, first: int, last: int) -> None:
        self._run(self._amax, first, last)

    def checksum(self, first: int, last: int) -> None:
        self._run(self._checksum, first, last)

    def _run(self, kernel: _Kernel, first: int, last: int) -> None:
        tiles = int(self._first_tile[first]), int(self._first_tile[last])
        if tiles[0] == tiles[1]:
            return
        tables = self._tiles.data_ptr(), self._slices.data_ptr(), self._bases.data_ptr()
        with self._current_stream() as stream:
            error = kernel(*tables, *tiles, self.num_blocks, self._ordinal, stream)
        if error:
            raise RuntimeError(f"slices {first}:{last} cannot be gone through on {self._device}: {self._reason(error)}")

    def _reason(self, error: int) -> str:
        return f"{self._error_string(error).decode()} (CUDA error {error})"

    def _ordinal_of(self, device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    def _upload(self, table: Array) -> Tensor:
        """The bytes of `table` on the device, there for all streams once this returns.

        On a stream of its own, so that the host does not wait for work that is queued on the current one.
        """
        with torch.cuda.stream(_upload_stream(self._ordinal)):
            return torch.from_numpy(table.view(np.uint8)).to(f"cuda:{self._ordinal}")

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        """The current stream of the device, which becomes the current device within.

        The allocator learns once per stream that it reads the tables, and keeps their memory until it has done so.
        """
        with torch.cuda.device(self._ordinal):
            stream = torch.cuda.current_stream()
            if stream.cuda_stream not in self._streams:
                for tensor in (self._tiles, self._slices, self._bases):
                    tensor.record_stream(stream)
                self._streams.add(stream.cuda_stream)
            yield stream.cuda_stream


@cache
def _upload_stream(ordinal: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(ordinal)  # type: ignore[no-untyped-call]


def _typed(function: Callable[..., int]) -> _Kernel:
    function.argtypes = _ARGUMENTS  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
