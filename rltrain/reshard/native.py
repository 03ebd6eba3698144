"""The native libraries of csrc/, with their descriptors and their loading.

`pip install` builds `_reshard_cpu.so` beside this file, and `_reshard_cuda.so` if it finds nvcc. The environment
variable RLTRAIN_NATIVE sets the behaviour without them:

    auto     torch operations instead, with one warning per process (default)
    off      torch operations, even if the libraries were built
    require  an error: for the CPU library always, for the CUDA library on CUDA devices
"""

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rltrain.errors import UserError, one_of
from rltrain.models.table import ITEM_BYTES, Array, ElementType

# Descriptors of strided two-dimensional slices, and their checks before any kernel follows them.

Numbers = NDArray[Any]

BLOCK = 128
"""Rows and columns of a block with one scale."""

SLICE = np.dtype(
    [
        ("src_offset", np.int64),
        ("dst_offset", np.int64),
        ("src_stride", np.int64),
        ("dst_stride", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("amax_offset", np.int64),
        ("amax_stride", np.int64),
        ("src_base", np.int32),
        ("dst_base", np.int32),
        ("amax_base", np.int32),
        ("src_type", np.uint8),
        ("dst_type", np.uint8),
        ("row_phase", np.uint8),
        ("col_phase", np.uint8),
    ]
)
"""The struct rs_slice of csrc/reshard.h, field by field. The header describes each field. amax_base is -1 if nothing is
quantised."""

ANY_TYPE = -1
"""The element type of a base of bytes. Such a base serves every type."""

PAIRS = frozenset(
    {(kind, kind) for kind in ElementType}
    | {(ElementType.FLOAT32, kind) for kind in ElementType}
    | {(kind, ElementType.FLOAT32) for kind in (ElementType.BFLOAT16, ElementType.FLOAT16)}
    | {(kind, ElementType.FLOAT8_E4M3) for kind in (ElementType.BFLOAT16, ElementType.FLOAT16)}
)
"""The supported (source, destination) types of a copy."""


@dataclass(frozen=True, eq=False)
class Bases:
    """The memory addressed by slices, as the element type (or ANY_TYPE) and the bytes of every base."""

    types: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


def is_empty(slices: Array) -> NDArray[np.bool_]:
    """Returns a mask of the slices [SLICE] without elements. Nothing is done for them, even if other fields are
    wrong."""
    empty: NDArray[np.bool_] = (slices["rows"] == 0) | (slices["cols"] == 0)
    return empty


def quantises(slices: Array) -> NDArray[np.bool_]:
    """Returns a mask of the quantising slices [SLICE]."""
    to_float8: NDArray[np.bool_] = slices["dst_type"] == ElementType.FLOAT8_E4M3
    from_float8: NDArray[np.bool_] = slices["src_type"] == ElementType.FLOAT8_E4M3
    return to_float8 & ~from_float8


def check_slices(slices: Array) -> None:
    """Checks slices [SLICE] by themselves, without their memory. Raises ValueError about the first wrong one."""
    if slices.dtype != SLICE or slices.ndim != 1:
        raise ValueError(f"slices are {slices.dtype} of shape {slices.shape}; expected one dimension of SLICE")
    supported = np.zeros((256, 256), dtype=bool)
    supported[tuple(np.array(sorted(PAIRS)).T)] = True
    _refuse(~supported[slices["src_type"], slices["dst_type"]], slices, "its pair of types cannot be copied")
    for name in ("rows", "cols", "src_offset", "dst_offset", "src_stride", "dst_stride"):
        _refuse(slices[name] < 0, slices, f"{name} is negative")
    overlap = (slices["rows"] > 1) & (slices["dst_stride"] < slices["cols"])
    _refuse(overlap, slices, "its rows overlap in the destination: dst_stride is less than cols")
    quantised = quantises(slices)
    _refuse(quantised & (slices["amax_base"] < 0), slices, "it quantises and has no amax_base")
    _refuse(~quantised & (slices["amax_base"] != -1), slices, "it has an amax_base and does not quantise")
    for name in ("amax_offset", "amax_stride"):
        _refuse(quantised & (slices[name] < 0), slices, f"{name} is negative")
    for name in ("row_phase", "col_phase"):
        _refuse(quantised & (slices[name] >= BLOCK), slices, f"{name} is not within a block of {BLOCK}")


def check_bounds(slices: Array, bases: Bases) -> None:
    """Checks slices [SLICE] against their bases. Raises ValueError if a slice leaves its base or meets another element
    type there. The message names the slice and the base."""
    for side in ("src", "dst"):
        check_side(slices, side, slices[f"{side}_type"], slices["rows"], slices["cols"], bases)
    quantised = quantises(slices) & ~is_empty(slices)
    rows = np.where(quantised, blocks_spanned(slices["row_phase"], slices["rows"]), 0)
    cols = np.where(quantised, blocks_spanned(slices["col_phase"], slices["cols"]), 0)
    check_side(slices, "amax", np.full(len(slices), ElementType.FLOAT32, dtype=np.uint8), rows, cols, bases)


def alignment(slices: Array, num_bases: int) -> NDArray[np.int64]:
    """Returns the required alignment of every base's address in bytes, shape [bases]."""
    result = np.ones(num_bases, dtype=np.int64)
    slices = slices[~is_empty(slices)]
    for side in ("src", "dst"):
        np.maximum.at(result, slices[f"{side}_base"], ITEM_BYTES[slices[f"{side}_type"]])
    np.maximum.at(result, slices["amax_base"][quantises(slices)], ITEM_BYTES[ElementType.FLOAT32])
    return result


def blocks_spanned(phase: Numbers, length: Numbers) -> NDArray[np.int64]:
    """Returns the number of blocks touched by `length` elements. The first element is at `phase` within its block."""
    result: NDArray[np.int64] = (phase + length + BLOCK - 1) // BLOCK
    return result


def check_side(slices: Array, side: str, kinds: Numbers, rows: Numbers, cols: Numbers, bases: Bases) -> None:
    """Does the work of `check_bounds` for one side ("src", "dst", "amax"). There, slices have `rows` and `cols` of
    types `kinds`."""
    used = np.flatnonzero((rows > 0) & (cols > 0))
    base = slices[f"{side}_base"][used]
    stranger = (base < 0) | (base >= len(bases.types))
    _refuse(stranger, slices, f"{side}_base is not one of the {len(bases.types)} bases", at=used)
    other = (bases.types[base] != ANY_TYPE) & (bases.types[base] != kinds[used])
    _refuse(other, slices, f"base {side}_base does not hold the elements that it copies there", at=used)
    # float64 is exact below 2**53 and does not wrap around above.
    last_row = (rows[used] - 1.0) * slices[f"{side}_stride"][used]
    num_bytes = (slices[f"{side}_offset"][used] + last_row + cols[used]) * ITEM_BYTES[kinds[used]]
    outside = num_bytes > bases.num_bytes[base]
    _refuse(outside, slices, f"it leaves base {side}_base", at=used, num_bytes=(num_bytes, bases.num_bytes[base]))


def _refuse(
    wrong: NDArray[np.bool_],
    slices: Array,
    reason: str,
    *,
    at: NDArray[np.intp] | None = None,
    num_bytes: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None,
) -> None:
    """Raises ValueError about the first `wrong` slice. If `at` is given, `wrong` is a mask of slices[at]."""
    if not wrong.any():
        return
    place = int(wrong.argmax())
    number = place if at is None else int(at[place])
    fields = ", ".join(f"{name}={slices[number][name]}" for name in SLICE.names or ())
    if num_bytes is not None:
        reason += f", of {num_bytes[1][place]} bytes: it ends {num_bytes[0][place]:.0f} bytes after its beginning"
    raise ValueError(f"slice {number} of {len(slices)}: {reason} ({fields})")


# Numbers of csrc/reshard_delta.h.

DELTA_BLOCK, DELTA_WHOLE = 256, 255
"""RS_DELTA_BLOCK and RS_DELTA_WHOLE. They are the elements of a block, and the length to mark a block sent whole."""


# Loading of the libraries, and the choice of the backend of a `CopyTable`.

logger = logging.getLogger(__name__)

ABI_VERSION = 6
"""RS_ABI_VERSION of csrc/reshard.h."""

CUDA_TILE_BYTES = 32
"""Bytes of a tile of the CUDA kernels. The host computes tiles (copy_table.py)."""

VARIABLE = "RLTRAIN_NATIVE"
MODES = ("auto", "off", "require")
REBUILD = "run `pip install -e .` in the repository, with g++ (and nvcc, for GPUs) on PATH"

Backend = Literal["cuda", "native", "torch"]


def mode() -> str:
    """Returns the value of RLTRAIN_NATIVE. Raises UserError if it is not one of MODES."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in MODES:
        raise UserError(f"{VARIABLE} is {value!r}; expected {one_of(value, MODES)}")
    return value


def backend(device_type: str) -> Backend:
    """Returns the backend of copies on devices of this type ("cpu", "cuda"). It is "torch" if native code is switched
    off or cannot be loaded. If it cannot be loaded, a warning says so once per process.

    Raises UserError if RLTRAIN_NATIVE requires a library and it cannot be loaded.
    """
    chosen = mode()
    if chosen == "off":
        return "torch"
    try:
        if device_type == "cuda":
            cuda_library()
            return "cuda"
        cpu_library()
        return "native"
    except LibraryError as error:
        if chosen == "require":
            raise UserError(f"{VARIABLE} is require, but {error}: {REBUILD}, or set {VARIABLE}=auto") from None
        _say_once(f"{error}; weights on {device_type} are copied by slower torch operations. To change that, {REBUILD}")
        return "torch"


class LibraryError(Exception):
    """A native library is absent, cannot be loaded, or was built from other sources."""


@cache
def cpu_library() -> ctypes.CDLL:
    """Loads the CPU library. Raises LibraryError if it cannot be used."""
    return load(_path("cpu"), "rs_cpu", {"slice": SLICE.itemsize})


@cache
def cuda_library() -> ctypes.CDLL:
    """Loads the CUDA library, even without a GPU. Raises LibraryError if it cannot be used."""
    return load(_path("cuda"), "rs_cuda", {"slice": SLICE.itemsize, "tile": CUDA_TILE_BYTES})


def load(path: Path, prefix: str, struct_bytes: dict[str, int]) -> ctypes.CDLL:
    """Loads the library at `path`. Its symbols begin with `prefix`. Raises LibraryError if it is missing, or if its ABI
    version or struct sizes differ from the expected ones."""
    if not path.exists():
        raise LibraryError(f"the native library {path.name} was not built")
    try:
        library = ctypes.CDLL(str(path))
        expected = {"abi_version": ABI_VERSION} | {f"sizeof_{name}": size for name, size in struct_bytes.items()}
        found = {name: int(getattr(library, f"{prefix}_{name}")()) for name in expected}
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the native library {path} cannot be loaded ({error})") from error
    if found != expected:
        raise LibraryError(f"the native library {path} was built from other sources (it has {found}, not {expected})")
    return library


def typed(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    """Declares the argument types of a library function and returns it. The function returns 0 on success."""
    function.argtypes = arguments  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"_reshard_{name}.so")


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


# Counters in memory shared by processes. One process raises a word, and others sleep until it reaches a value.

Words = NDArray[np.uint32]
WORD_MASK = 2**32 - 1


def available() -> bool:
    """Returns whether this process uses the CPU library. Counters need it."""
    return backend("cpu") == "native"


class Signal:
    """A counter in a 32-bit word of shared memory. It wraps around."""

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        library = cpu_library()
        self._address = ctypes.c_void_p(words.ctypes.data + number * words.itemsize)
        self._signal, self._await = library.rs_cpu_signal, library.rs_cpu_await

    def set(self, value: int) -> None:
        """Sets the counter and wakes its waiters. They see everything written before by this process."""
        self._signal(self._address, ctypes.c_uint32(value & WORD_MASK))

    def wait(self, value: int, timeout_s: float) -> bool:
        """Waits until the counter reaches `value`. Returns false if it has not after `timeout_s` seconds. Other threads
        of this process run meanwhile."""
        return not self._await(self._address, ctypes.c_uint32(value & WORD_MASK), ctypes.c_int64(int(timeout_s * 1e9)))
