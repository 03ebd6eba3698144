"""Copies many strided two-dimensional slices in one call, with casts and FP8 quantisation on the way.

A `CopyTable` is made once from descriptors [SLICE]. It gets its memory by `bind`, so it outlives the tensors.
`native.backend` chooses the implementation per device: CUDA kernels, native CPU code, or torch operations if neither
was built. All give the same bits (see csrc/reshard.h).
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard import native
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.reshard.native import (
    ANY_TYPE,
    BLOCK,
    SLICE,
    Bases,
    alignment,
    blocks_spanned,
    check_bounds,
    check_slices,
    is_empty,
    quantises,
)

# Copies of slices on the CPU by csrc/reshard_cpu.cpp.


class CpuCopies:
    """The twin of `TorchCopies` in native code for the CPU. It uses torch's number of threads at the time of a
    launch."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        self._slices = slices
        self._table = slices.ctypes.data
        self._bases = np.zeros(0, dtype=np.uint64)
        self._pointers = 0
        library = native.cpu_library()
        arguments = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        self._copy, self._amax, self._checksum = (
            native.typed(library[f"rs_cpu_{name}"], *arguments) for name in ("copy", "amax", "checksum")
        )

    def bind(self, tensors: Sequence[Tensor]) -> None:
        self._bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        self._pointers = self._bases.ctypes.data

    def launch(self, first: int, last: int) -> None:
        self._run(self._copy, first, last)

    def amax(self, first: int, last: int) -> None:
        self._run(self._amax, first, last)

    def checksum(self, first: int, last: int) -> None:
        self._run(self._checksum, first, last)

    def addresses(self, first: int, last: int) -> tuple[int, int, int]:
        """Returns the addresses described in `CopyTable.addresses`."""
        return self._table + first * SLICE.itemsize, last - first, self._pointers

    def _run(self, function: Callable[..., int], first: int, last: int) -> None:
        if function(*self.addresses(first, last), torch.get_num_threads()):
            raise RuntimeError(f"the native library could not process slices {first}:{last}: out of memory")


# Tiles of slices, for the warps of the CUDA kernels.

TILE = np.dtype(
    [
        ("row", np.int64),
        ("col", np.int64),
        ("rows", np.int32),
        ("cols", np.int32),
        ("slice", np.int32),
        ("unused", np.int32),
    ]
)
"""The struct rs_tile of csrc/reshard_cuda_tiles.h, field by field."""

TILE_BYTES = 16384
"""Maximum bytes of a tile, in the wider of its two types. They are four rounds of a warp's loads."""

_ALIGNMENT = 16
"""Columns between tiles are multiples of it. If vectors fit in a row, they fit in all of its tiles."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Slices cut into tiles. The tiles of slices[first:last] are tiles[first_tile[first]:first_tile[last]]."""

    slices: Array
    """The given slices. A slice without gaps between its rows is one row here."""
    tiles: Array
    first_tile: NDArray[np.int64]
    """The number of the first tile of each slice, shape [slices + 1]."""


def cut(slices: Array) -> Tiles:
    """Cuts `slices` [SLICE] into tiles. Tiles cover the slices exactly, in the order of the slices, then by rows, then
    by columns.

    Each tile of a quantising slice is within one block.
    """
    joined = _joined(slices)
    tile_rows, tile_cols, above, left = _shapes(joined)
    rows, cols = joined["rows"], joined["cols"]
    filled = (rows > 0) & (cols > 0)
    down = np.where(filled, -(-(above + rows) // tile_rows), 0)
    across = np.where(filled, -(-(left + cols) // tile_cols), 0)

    first_tile = np.zeros(len(joined) + 1, dtype=np.int64)
    np.cumsum(down * across, out=first_tile[1:])
    number = np.repeat(np.arange(len(joined)), np.diff(first_tile))
    i, j = np.divmod(np.arange(first_tile[-1]) - first_tile[number], across[number])

    tiles = np.zeros(len(number), dtype=TILE)
    tiles["slice"] = number
    tiles["row"], tiles["rows"] = _pieces(i, tile_rows[number], above[number], rows[number])
    tiles["col"], tiles["cols"] = _pieces(j, tile_cols[number], left[number], cols[number])
    return Tiles(joined, tiles, first_tile)


def _joined(slices: Array) -> Array:
    """Returns the slices. If neither side has gaps between the rows of a slice, its rows are joined to one."""
    joined = slices.copy()
    without_gaps = (slices["src_stride"] == slices["cols"]) & (slices["dst_stride"] == slices["cols"])
    chosen = (without_gaps | (slices["rows"] == 1)) & ~quantises(slices)
    joined["cols"][chosen] *= joined["rows"][chosen]
    joined["rows"][chosen] = np.minimum(joined["rows"][chosen], 1)
    return joined


def _shapes(slices: Array) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns (tile_rows, tile_cols, above, left) for each slice. Its first tile begins `above` rows above and `left`
    columns left of the slice."""
    quantised = quantises(slices)
    most = TILE_BYTES // np.maximum(ITEM_BYTES[slices["src_type"]], ITEM_BYTES[slices["dst_type"]])
    # About equal parts of a row.
    across = np.maximum(-(-slices["cols"] // most), 1)
    aligned = -(-slices["cols"] // (across * _ALIGNMENT)) * _ALIGNMENT
    tile_cols = np.where(quantised, BLOCK, np.maximum(aligned, 1))
    tile_rows = np.maximum(most // np.maximum(np.minimum(tile_cols, slices["cols"]), 1), 1)
    # A power of two, so blocks consist of whole tiles.
    within_block = np.minimum(2 ** np.log2(tile_rows).astype(np.int64), BLOCK)
    tile_rows = np.where(quantised, within_block, tile_rows)
    above = np.where(quantised, slices["row_phase"] % tile_rows, 0)
    left = np.where(quantised, slices["col_phase"], 0)
    return tile_rows, tile_cols, above, left


def _pieces(
    number: NDArray[np.int64], size: NDArray[np.int64], before: NDArray[np.int64], length: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns start and length of the number-th piece of `length`. Pieces have `size` elements, counted from `before`
    elements ahead of the start."""
    start = np.maximum(number * size - before, 0)
    end = np.minimum((number + 1) * size - before, length)
    return start, end - start


# Copies of slices on NVIDIA GPUs by csrc/reshard_cuda.cu.

assert TILE.itemsize == native.CUDA_TILE_BYTES


class CudaKernels:
    """Functions of the CUDA library, launched on the current stream of `device`. Launches are asynchronous.

    Set `num_blocks` lower to leave multiprocessors to concurrent work. Two blocks fill one multiprocessor.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = native.cuda_library()
        self._library.rs_cuda_error_string.restype = ctypes.c_char_p
        self._device, self._ordinal = device, self._ordinal_of(device)
        self.num_blocks = int(self._library.rs_cuda_num_blocks(self._ordinal))
        if self.num_blocks < 0:
            raise RuntimeError(f"no multiprocessors of {device} can be counted: {self._reason(-self.num_blocks)}")

    def _kernel(self, name: str, *arguments: type) -> Callable[..., int]:
        """Returns a function of the library. It takes `arguments`, then blocks, device and stream."""
        return native.typed(self._library[name], *arguments, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)

    def _start(self, kernel: Callable[..., int], *arguments: int, told: str) -> None:
        """Launches a kernel. `told` is the beginning of an error message."""
        with self._current_stream() as stream:
            error = kernel(*arguments, self.num_blocks, self._ordinal, stream)
        if error:
            raise RuntimeError(f"{told} on {self._device}: {self._reason(error)}")

    def _reason(self, error: int) -> str:
        return f"{self._library.rs_cuda_error_string(error).decode()} (CUDA error {error})"

    def _ordinal_of(self, device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        """Yields the current stream of the device. Inside, the device is the current one."""
        with torch.cuda.device(self._ordinal):
            yield torch.cuda.current_stream().cuda_stream


class CudaCopies(CudaKernels):
    """The twin of `TorchCopies` by CUDA kernels."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        super().__init__(device)
        # tiles, slices, bases, first tile, last tile
        arguments = (ctypes.c_void_p,) * 3 + (ctypes.c_int64,) * 2
        self._copy, self._amax, self._checksum = (
            self._kernel(f"rs_cuda_{name}", *arguments) for name in ("copy", "amax", "checksum")
        )
        tiles = cut(slices)
        self._first_tile = tiles.first_tile
        self._slices = self._upload(tiles.slices)
        self._tiles = self._upload(tiles.tiles)
        self._pointers: list[int] = []
        self._bases = self._upload(np.zeros(0, dtype=np.uint64))
        self._streams: set[int] = set()

    def bind(self, tensors: Sequence[Tensor]) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers == self._pointers:
            return
        # A new table, because launches under way still read the former one. Its memory is not reused before they end.
        self._bases = self._upload(np.array(pointers, dtype=np.uint64))
        self._streams.clear()
        self._pointers = pointers

    def launch(self, first: int, last: int) -> None:
        self._run(self._copy, first, last)

    def amax(self, first: int, last: int) -> None:
        self._run(self._amax, first, last)

    def checksum(self, first: int, last: int) -> None:
        self._run(self._checksum, first, last)

    def _run(self, kernel: Callable[..., int], first: int, last: int) -> None:
        tiles = int(self._first_tile[first]), int(self._first_tile[last])
        if tiles[0] < tiles[1]:
            tables = self._tiles.data_ptr(), self._slices.data_ptr(), self._bases.data_ptr()
            self._start(kernel, *tables, *tiles, told=f"cannot process slices {first}:{last}")

    def _upload(self, table: Array) -> Tensor:
        """Returns the bytes of `table` on the device, ready for all streams.

        It uses a separate stream, so the host does not wait for work queued on the current one.
        """
        with torch.cuda.stream(_upload_stream(self._ordinal)):
            return torch.from_numpy(table.view(np.uint8)).to(f"cuda:{self._ordinal}")

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        """Yields the current stream. Also makes the allocator keep the memory of the tables until this stream has read
        them."""
        with super()._current_stream() as stream:
            if stream not in self._streams:
                for tensor in (self._tiles, self._slices, self._bases):
                    tensor.record_stream(torch.cuda.current_stream())
                self._streams.add(stream)
            yield stream


@cache
def _upload_stream(ordinal: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(ordinal)  # type: ignore[no-untyped-call]


# Torch's dtype of every element type, and zeroed parameters of a layout.

DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
}


Zeros = Callable[[Sequence[tuple[Sequence[int], torch.dtype]]], list[Tensor]]
"""A function that returns zeroed tensors of these shapes and dtypes."""


def allocate_parameters(
    layout: Layout, rank: int, *, device: torch.device | str = "cpu", zeros: Zeros | None = None
) -> dict[str, Tensor]:
    """Returns a zeroed tensor for every parameter of `rank` in `layout`, by name. `zeros` allocates them on another
    way than torch."""
    numbers = parameter_types(layout, layout.parts[layout.ranks.index(rank)]).tolist()
    parameters = layout.on(rank).parameters
    kinds = [(shape, DTYPES[ElementType(number)]) for (_, shape), number in zip(parameters, numbers, strict=True)]
    if zeros is None:
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    else:
        tensors = zeros(kinds)
    return {name: tensor for (name, _), tensor in zip(parameters, tensors, strict=True)}


# FP8 in blocks by torch operations. The kernels equal this reference bit for bit.
#
# A matrix [R, C] is cut into blocks of 128 x 128 elements, with partial blocks at its right and lower edges. Per block,
# in float32:
#
#     amax    = max |x|, NaN if any x is NaN
#     a       = max(amax, 2**-100)
#     scale   = a / 448
#     inverse = 448 / a
#     q       = x * inverse, rounded to nearest even in e4m3, saturated at 448
#
# 448 is the largest e4m3 number, and x is about q * scale. If amax is not finite, scale is the NaN 0x7fc00000 and every
# q is the NaN 0x7f.
#
# Both quotients are rounded from the exact ones, so divisor and dividend are tensors. With a Python number as one of
# them, torch would multiply with a rounded reciprocal instead.

MAX_FLOAT8 = 448.0
SMALLEST_AMAX = 2.0**-100
NAN_FLOAT8 = 0x7F


def block_amax(x: Tensor) -> Tensor:
    """Returns the largest magnitude of each block of `x` [R, C], as float32 [ceil(R / 128), ceil(C / 128)]. A block
    with a NaN gets NaN."""
    rows, cols = (-(-size // BLOCK) for size in x.shape)
    magnitudes = torch.nn.functional.pad(x.abs(), (0, cols * BLOCK - x.shape[1], 0, rows * BLOCK - x.shape[0]))
    amax = magnitudes.view(rows, BLOCK, cols, BLOCK).amax((1, 3)).float()
    return torch.where(amax.isnan(), torch.nan, amax)


def scales_of(amax: Tensor) -> Tensor:
    """Returns the scales of blocks of these magnitudes, float32 of the same shape. A quantised element times its scale
    approximates the original. A magnitude without a finite value gives NaN."""
    a = amax.clamp(min=SMALLEST_AMAX)
    return torch.where(amax.isfinite(), a / torch.full_like(a, MAX_FLOAT8), torch.nan)


def inverse_scales_of(amax: Tensor) -> Tensor:
    """Returns the factors of elements before rounding, for blocks of these magnitudes. NaN as in `scales_of`."""
    a = amax.clamp(min=SMALLEST_AMAX)
    return torch.where(amax.isfinite(), torch.full_like(a, MAX_FLOAT8) / a, torch.nan)


def quantize_elements(x: Tensor, inverse: Tensor) -> Tensor:
    """Returns `x` times `inverse` in e4m3. `inverse` has the shape of `x` or broadcasts to it."""
    scaled = x.float() * inverse
    q = scaled.clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)
    q.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_FLOAT8)
    return q


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises `x` [R, C] in blocks. Returns float8_e4m3fn [R, C] and the scales of its blocks, float32 [ceil(R /
    128), ceil(C / 128)]."""
    amax = block_amax(x)
    return quantize_elements(x, per_element(inverse_scales_of(amax), x.shape)), scales_of(amax)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """Returns the float32 values [R, C] of a result of `quantize_blocks`."""
    return q.float() * per_element(scales, q.shape)


def per_element(blocks: Tensor, shape: torch.Size, *, row_phase: int = 0, col_phase: int = 0) -> Tensor:
    """Expands values per block to values per element of a matrix of this shape. The phases are the position of the
    matrix's first element within the first block."""
    rows = torch.arange(row_phase, row_phase + shape[0], device=blocks.device) // BLOCK
    cols = torch.arange(col_phase, col_phase + shape[1], device=blocks.device) // BLOCK
    return blocks[rows[:, None], cols]


# The checksum of csrc/reshard.h by torch operations.

MAX_ELEMENTS = 2**18
"""Elements processed at a time, few enough for the caches of a CPU. Each needs some tens of bytes of temporary
memory."""

RUN, PRESENT = 1024, 0xFFA5C3E7
"""RS_RUN and RS_PRESENT of csrc/reshard.h."""

# Copies by torch operations, one slice at a time. They are used without a native library, and as the reference for its
# bits.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float8_e4m3fn: 0x7E}
"""The bits of the largest magnitude of each type, NaN excluded."""

_LOW_HALF = 0xFFFFFFFF
_FIRST_FACTOR, _SECOND_FACTOR = -0x61C8864680B583EB, -0x4B47D0C5A0A8B1AD


def bits_of(values: Tensor, *, exact: bool) -> Tensor:
    """Returns the bits of `values` as non-negative int64. Unless `exact`, all NaNs have the same bits."""
    num_bits = 8 * values.dtype.itemsize
    bits = values.view(_BITS[values.dtype.itemsize]).to(torch.int64) & ((1 << num_bits) - 1)
    if not exact:
        unsigned = (1 << (num_bits - 1)) - 1
        bits = bits.masked_fill((bits & unsigned) > _INFINITY[values.dtype], _INFINITY[values.dtype] + 1)
    return bits


def keyed_sum(bits: Tensor, place: int, width: int) -> Tensor:
    """Returns the keyed sum of `bits` [rows, cols] as a scalar int64. They begin at element `place` of a tensor with
    `width` columns."""
    rows, cols = (torch.arange(size, device=bits.device) for size in bits.shape)
    places = place + rows[:, None] * width + cols
    first, last = place // RUN, (place + (len(rows) - 1) * width + len(cols) - 1) // RUN
    run_keys = _run_keys(torch.arange(first, last + 1, device=bits.device))
    place_keys = _place_keys(torch.arange(RUN, device=bits.device))
    return (run_keys[(places // RUN) - first] * (place_keys[places % RUN] * (bits ^ PRESENT))).sum()


def _run_keys(runs: Tensor) -> Tensor:
    """Computes rs_run_key of csrc/. Products and sums wrap around."""
    mixed = (runs + 1) * _FIRST_FACTOR
    mixed = (mixed ^ ((mixed >> 32) & _LOW_HALF)) * _SECOND_FACTOR
    return (mixed ^ ((mixed >> 32) & _LOW_HALF)) | 1


def _place_keys(places: Tensor) -> Tensor:
    """Computes rs_place_key of csrc/."""
    mixed = (places + 0x9E3779B9) & _LOW_HALF
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _LOW_HALF
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & _LOW_HALF
    return mixed ^ (mixed >> 16)


# torch's own NaNs differ between its vectorised and scalar code, and between CPUs and GPUs (csrc/reshard.h).
_NANS = {ElementType.FLOAT32: 0x7FFFFFFF, ElementType.BFLOAT16: 0x7FFF, ElementType.FLOAT16: 0x7FFF}


class TorchCopies:
    """A table of slices, processed by torch operations. The slices must have been checked."""

    def __init__(self, slices: Array, device: torch.device) -> None:
        """`slices` [SLICE] must be contiguous and belong to this object. `device` is the device of all memory."""
        self._slices = slices
        self._quantises = quantises(slices)
        self._empty = is_empty(slices)
        self._tensors: Sequence[Tensor] = ()

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Makes tensor number i base i."""
        self._tensors = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]

    @torch.no_grad()
    def launch(self, first: int, last: int) -> None:
        """Copies slices[first:last], with 0 <= first < last <= len(slices)."""
        for number in first + np.flatnonzero(~self._empty[first:last]):
            self._copy(self._slices[number], quantised=bool(self._quantises[number]))

    @torch.no_grad()
    def amax(self, first: int, last: int) -> None:
        """Raises the amax entries of the quantising slices in slices[first:last] to the magnitudes of their elements.
        Skips all other slices."""
        for number in first + np.flatnonzero(self._quantises[first:last] & ~self._empty[first:last]):
            self._raise_amax(self._slices[number])

    @torch.no_grad()
    def checksum(self, first: int, last: int) -> None:
        """Adds the checksums of slices[first:last] to their sums. These slices have no destination (see
        checksums.py)."""
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
            # Copied as bits, because a copy of floats may quieten a NaN.
            self._box(copy, "dst", as_bits=True).copy_(self._box(copy, "src", as_bits=True))
        else:
            destination.copy_(source)
            if source_type != ElementType.BFLOAT16:  # to float32 it is a shift and keeps a NaN's bits
                self._box(copy, "dst", as_bits=True).masked_fill_(source.isnan(), _NANS[destination_type])

    def _raise_amax(self, copy: np.void) -> None:
        above, left = int(copy["row_phase"]), int(copy["col_phase"])
        part = block_amax(torch.nn.functional.pad(self._box(copy, "src"), (left, 0, above, 0)))
        entries = self._amax_entries(copy)
        # Compared as integers. They order as the magnitudes do, with NaN above all.
        entries.view(torch.int32).copy_(torch.maximum(entries.view(torch.int32), part.view(torch.int32)))

    def _amax_entries(self, copy: np.void) -> Tensor:
        rows, cols = (int(blocks_spanned(copy[f"{axis}_phase"], copy[f"{axis}s"])) for axis in ("row", "col"))
        floats = self._as(int(copy["amax_base"]), torch.float32)
        return floats[int(copy["amax_offset"]) :].as_strided((rows, cols), (int(copy["amax_stride"]), 1))

    def _box(self, copy: np.void, side: str, *, as_bits: bool = False) -> Tensor:
        """Returns the slice's elements in the memory of a side, shape [rows, cols]."""
        dtype = DTYPES[ElementType(copy[f"{side}_type"])]
        elements = self._as(int(copy[f"{side}_base"]), _BITS[dtype.itemsize] if as_bits else dtype)
        # Sliced first, because as_strided's own offset counts from the storage. Other tensors may come first in it.
        start, stride = int(copy[f"{side}_offset"]), int(copy[f"{side}_stride"])
        return elements[start:].as_strided((int(copy["rows"]), int(copy["cols"])), (stride, 1))

    def _as(self, base: int, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors[base]
        return tensor[: tensor.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


_TYPES: dict[torch.dtype, int] = {dtype: kind for kind, dtype in DTYPES.items()} | {torch.uint8: ANY_TYPE}


class CopyTable:
    """A table of copies between the last bound tensors, described by `slices` [SLICE]. `device` is the device of all
    tensors.

    Raises ValueError if a slice is wrong in itself: a pair of types without a copy, a negative offset, or overlapping
    rows in the destination. Different slices must not write the same elements. This is not checked.
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
        """Makes tensor number i base i. It must be contiguous, of any shape, in memory accessible to the table's
        device.

        Its dtype must be the type in its slices. A uint8 tensor serves every type. If dtypes and sizes are those of the
        last bound tensors, only addresses are read again. Tensors are kept alive until the next `bind` or `release`.
        Raises ValueError if a slice leaves its base or meets another type there. The message names the slice and the
        base.
        """
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        if sizes != self._checked:
            self._check(sizes)
        for number, tensor in enumerate(tensors):
            if not tensor.is_contiguous() or not self._reaches(tensor):
                raise ValueError(
                    f"base {number} is on {tensor.device} with strides {tensor.stride()}: expected a contiguous tensor "
                    f"on {self._device}"
                )
            if tensor.data_ptr() % self._alignment[number]:
                raise ValueError(f"base {number} begins between two elements of {self._alignment[number]} bytes")
        self._copies.bind(tensors)
        self._bound = list(tensors)

    def _reaches(self, tensor: Tensor) -> bool:
        """Returns whether the table's device can address a tensor. CUDA devices can also address pinned host memory."""
        same = tensor.device.type == self._device.type
        return same or (self._device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned())

    def release(self) -> None:
        """Drops the tensors, so their memory can be freed. Call `bind` before the next launch."""
        self._bound = None
        if isinstance(self._copies, TorchCopies):
            self._copies.bind(())

    def launch(self, first: int, last: int) -> None:
        """Copies slices[first:last] in one call. On CUDA it is asynchronous, on the device's current stream. On the CPU
        it is done on return."""
        if self._begin(first, last):
            self._copies.launch(first, last)

    def amax(self, first: int, last: int) -> None:
        """Raises the amax entries of the quantising slices in slices[first:last] to the largest magnitude of their
        elements.

        Zero the table of entries before. An entry becomes the larger of itself and the slice's part of the block, so
        several slices can share a block. A block with a NaN gets a NaN. Bits of amax entries order as integers. To
        reduce them over ranks, use int32 views, because a float maximum may drop NaN.
        """
        if self._begin(first, last):
            self._copies.amax(first, last)

    def addresses(self, first: int, last: int) -> tuple[int, int, int]:
        """Returns (address of slices[first:last], their number, address of the bases' addresses). Native code on the
        CPU can then process the slices itself. Counts as a launch."""
        assert isinstance(self._copies, CpuCopies), "there is native code for CPUs"
        self._begin(first, last)
        return self._copies.addresses(first, last)

    def _begin(self, first: int, last: int) -> bool:
        """Returns whether the range has any slices. If so, it counts as a launch."""
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


def backend_class(device: torch.device) -> type[CpuCopies] | type[CudaCopies] | type[TorchCopies]:
    """Returns the class for slices on `device`. Raises UserError as `native.backend` does."""
    match native.backend(device.type):
        case "cuda":
            return CudaCopies
        case "native":
            return CpuCopies
    return TorchCopies
