"""zlib's CRC-32, by csrc/reshard_cpu_crc32.h where the processor has what that needs: some ten times as fast."""

import ctypes
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np

from rltrain.reshard.kernels import native

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
    if native.mode() == "off":
        return None
    try:
        library = native.cpu_library()
    except native.LibraryError:
        return None  # the job's start says that the library is missing
    if not library.rs_cpu_crc32_is_fast():
        return None
    function = library.rs_cpu_crc32
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint32
    return function
