"""Counters in memory that processes share: one raises a word, others sleep until it has come to a value."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from rltrain.reshard.kernels import native

Words = NDArray[np.uint32]
WORD_MASK = 2**32 - 1


def available() -> bool:
    """Whether the CPU library is used in this process, without which there are none."""
    return native.backend("cpu") == "native"


class Signal:
    """A word of shared memory that counts up, and around."""

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        library = native.cpu_library()
        self._address = ctypes.c_void_p(words.ctypes.data + number * words.itemsize)
        self._signal, self._await = library.rs_cpu_signal, library.rs_cpu_await

    def set(self, value: int) -> None:
        """Wakes those who wait for it. They see what this process has written before."""
        self._signal(self._address, ctypes.c_uint32(value & WORD_MASK))

    def wait(self, value: int, timeout_s: float) -> bool:
        """Whether the word has come to `value` within `timeout_s`; other threads of this process run meanwhile."""
        return not self._await(self._address, ctypes.c_uint32(value & WORD_MASK), ctypes.c_int64(int(timeout_s * 1e9)))
