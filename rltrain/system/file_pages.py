"""What Linux is told of the pages of files: to map many at once, and to write them out while more is written.

Elsewhere, and on kernels that do not know a call, nothing is done, and pages come and go one after the other.
"""

import ctypes
import mmap
import sys

MADV_POPULATE_READ = 22
"""Of Linux 5.14."""
SYNC_FILE_RANGE_WRITE = 2

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def populate(address: int, num_bytes: int) -> None:
    """Have the pages of mapped files that lie there in this process's page table; memory that is no file's stays as
    it is. A fault for every sixteen pages takes as long as copying them."""
    if _LIBC is not None and num_bytes > mmap.PAGESIZE:
        begin = address - address % mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), MADV_POPULATE_READ)


def begin_writing_out(descriptor: int, first: int, num_bytes: int) -> None:
    """Have the disk begin with bytes that were written to a file, so that `os.fsync`, which also tells what the disk
    refuses, has less to wait for."""
    if _LIBC is not None:
        _LIBC.sync_file_range(descriptor, ctypes.c_int64(first), ctypes.c_int64(num_bytes), SYNC_FILE_RANGE_WRITE)
