"""Finding and loading the native libraries of csrc/, and choosing what carries out a `CopyTable`.

`pip install` builds `_reshard_cpu.so`, and `_reshard_cuda.so` where nvcc is found, beside this file. The environment
variable RLTRAIN_NATIVE says what happens without them:

    auto     torch operations instead, said once per process (default)
    off      torch operations, whatever was built
    require  an error: for the CPU library always, for the CUDA library on CUDA devices
"""

import ctypes
import logging
import os
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rltrain.errors import UserError, one_of
from rltrain.reshard.slices import SLICE

logger = logging.getLogger(__name__)

ABI_VERSION = 6
"""RS_ABI_VERSION of csrc/reshard.h."""

CUDA_TILE_BYTES = 32
"""Bytes of a tile of the CUDA kernels, which the host computes (tiles.py)."""

VARIABLE = "RLTRAIN_NATIVE"
MODES = ("auto", "off", "require")
REBUILD = "run `pip install -e .` in the repository, with g++ (and nvcc, for GPUs) on PATH"

Backend = Literal["cuda", "native", "torch"]


def mode() -> str:
    """The value of RLTRAIN_NATIVE. Raises UserError where it is none of MODES."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in MODES:
        raise UserError(f"{VARIABLE} is {value!r}; expected {one_of(value, MODES)}")
    return value


def backend(device_type: str) -> Backend:
    """What copies slices on devices of this type ("cpu", "cuda"): "torch" where the native library is switched off or
    cannot be loaded, which is then said once per process.

    Raises UserError where RLTRAIN_NATIVE requires what cannot be loaded.
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
    """Raises LibraryError."""
    return load(_path("cpu"), "rs_cpu", {"slice": SLICE.itemsize})


@cache
def cuda_library() -> ctypes.CDLL:
    """Raises LibraryError; loads where there is no GPU as well."""
    return load(_path("cuda"), "rs_cuda", {"slice": SLICE.itemsize, "tile": CUDA_TILE_BYTES})


def load(path: Path, prefix: str, struct_bytes: dict[str, int]) -> ctypes.CDLL:
    """The library at `path`, whose symbols begin with `prefix`, after comparing its ABI version and the sizes of its
    structs with what this package expects. Raises LibraryError."""
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


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"_reshard_{name}.so")


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


# zlib's CRC-32, by csrc/reshard_cpu_crc32.h where the processor has what that needs: some ten times as fast.

SHORT_BYTES = 4096
"""Of less than that zlib's own takes no longer than a call."""


def crc32(data: memoryview, value: int = 0) -> int:
    """Of contiguous bytes that follow those whose checksum is `value`; the same with and without native code. Other
    threads run meanwhile."""
    native_crc32 = _native() if data.nbytes >= SHORT_BYTES else None
    if native_crc32 is None:
        return zlib.crc32(data, value)
    return native_crc32(value, np.frombuffer(data, dtype=np.uint8).ctypes.data, data.nbytes)


@cache
def _native() -> Callable[[int, int, int], int] | None:
    """None where zlib's is to be taken."""
    if mode() == "off":
        return None
    try:
        library = cpu_library()
    except LibraryError:
        return None  # the job's start says that the library is missing
    if not library.rs_cpu_crc32_is_fast():
        return None
    function = library.rs_cpu_crc32
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint32
    return function


# Counters in memory that processes share: one raises a word, others sleep until it has come to a value.

Words = NDArray[np.uint32]
WORD_MASK = 2**32 - 1


def available() -> bool:
    """Whether the CPU library is used in this process, without which there are none."""
    return backend("cpu") == "native"


class Signal:
    """A word of shared memory that counts up, and around."""

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        library = cpu_library()
        self._address = ctypes.c_void_p(words.ctypes.data + number * words.itemsize)
        self._signal, self._await = library.rs_cpu_signal, library.rs_cpu_await

    def set(self, value: int) -> None:
        """Wakes those who wait for it. They see what this process has written before."""
        self._signal(self._address, ctypes.c_uint32(value & WORD_MASK))

    def wait(self, value: int, timeout_s: float) -> bool:
        """Whether the word has come to `value` within `timeout_s`; other threads of this process run meanwhile."""
        return not self._await(self._address, ctypes.c_uint32(value & WORD_MASK), ctypes.c_int64(int(timeout_s * 1e9)))
