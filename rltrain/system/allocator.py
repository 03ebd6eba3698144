"""What the C library does with memory that is freed."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""

KEPT_BYTES = 256 * 2**20
LARGEST_KEPT_BYTES = 32 * 2**20
"""glibc takes no larger limit."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep up to 256 MB of what it frees for what it allocates next, in pieces of up to 32 MB; False
    where the C library is not glibc, or the environment says what it does.

    Else tensors of a training step come from the kernel anew, page by page, which fills each with zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
