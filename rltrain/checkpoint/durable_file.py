"""Writes a file once, fast and durably."""

import ctypes
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from rltrain.runtime.machine import JobThread

# Blocks written in their order by a thread, while the caller makes the next ones.
#
# Writing takes about as long as making the contents by mapping pages, checksums, casts or a reshard. Neither holds up
# other threads. One thread writes a file, because systems do not let two write to one file at a time.


class WriteBehind:
    """A thread for calls of `write` with one block after another. At most `most_bytes` wait for it, or one larger
    block.

    `put`, `wait_for` and `close` raise any error of `write`. No further block is written then. `close` or `give_up`
    ends the thread. The thread has the priority of its creator.
    """

    def __init__(self, write: Callable[[memoryview], None], most_bytes: int) -> None:
        self._write, self._most_bytes = write, most_bytes
        self._waiting: deque[memoryview] = deque()
        self._given_bytes = self._written_bytes = 0
        self._closing = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        # A daemon, because a file may never be closed, as after an error.
        self._thread = JobThread(target=self._write_blocks, name="file writer", daemon=True)
        self._thread.start()

    def put(self, block: memoryview) -> None:
        """Takes a block of contiguous bytes. It must not change before it is written. Waits for room."""
        self.wait_for(self._given_bytes + len(block) - self._most_bytes)
        with self._changed:
            self._given_bytes += len(block)
            self._waiting.append(block)
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Waits until the first `num_bytes` of all blocks are written, or all blocks if they have fewer."""
        needed = min(num_bytes, self._given_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._written_bytes >= needed or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Waits until all blocks are written, then ends the thread."""
        try:
            self.wait_for(self._given_bytes)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Ends the thread without writing the waiting blocks."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _write_blocks(self) -> None:
        while (block := self._next()) is not None:
            try:
                self._write(block)
            except Exception as failure:  # raised when the next block is put or the file is closed
                with self._changed:
                    self._failure = failure
                    self._changed.notify_all()
                return
            with self._changed:
                self._written_bytes += len(block)
                self._changed.notify_all()

    def _next(self) -> memoryview | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None


# Advice to Linux about the pages of files. It maps many at once, and writes them out while more are written.
#
# On other systems and on older kernels this does nothing. Pages are then mapped and written one by one.

MADV_POPULATE_READ = 22
"""Since Linux 5.14."""
SYNC_FILE_RANGE_WRITE = 2

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def populate(address: int, num_bytes: int) -> None:
    """Maps the pages of files at this address into the process's page table. Other memory stays unchanged. Without it,
    a fault for every sixteen pages takes as long as copying them."""
    if _LIBC is not None and num_bytes > mmap.PAGESIZE:
        begin = address - address % mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), MADV_POPULATE_READ)


def begin_writing_out(descriptor: int, first: int, num_bytes: int) -> None:
    """Makes the disk begin with bytes written to a file, so `os.fsync` has less to wait for. Only `os.fsync` reports
    errors of the disk."""
    if _LIBC is not None:
        _LIBC.sync_file_range(descriptor, ctypes.c_int64(first), ctypes.c_int64(num_bytes), SYNC_FILE_RANGE_WRITE)


# A file written once from beginning to end, as fast as memory and disk allow, and then durable.

BLOCK_BYTES = 2**18
"""Bytes written at a time. So few are still in a core's cache after their checksum was computed."""
BEHIND_BLOCK_BYTES = 2**20
"""Bytes written at a time by a thread. So many make the switch of threads a small part of the time."""
TAKEN_BYTES = 8 * 2**20
"""Bytes copied to the host at a time. The next ones reuse the memory."""
BEHIND_BYTES = 4 * 2**20
"""Maximum bytes waiting for a writing thread, if data is made piece by piece. So few are still in the processor's
caches."""
OUT_BYTES = 16 * 2**20
"""Bytes written before the disk is made to begin with them."""


class DurableFile:
    """A new file. As a context manager, it is complete and durable when its block ends without an error.

    `num_bytes` counts the bytes given so far. With `checksum`, `crc32` is zlib's CRC-32 of them, or of the bytes since
    it was last set to 0. With `most_cached_bytes`, at most so many bytes stay in the system's memory. Writing is then
    as slow as the disk. With `behind_bytes`, a thread writes, and at most so many bytes wait for it. Their memory must
    not change before `wait_for`. Raises FileExistsError if the file exists, and OSError if writing fails. An error of
    the thread is raised by a later call.
    """

    def __init__(
        self, path: Path, *, checksum: bool = False, most_cached_bytes: int | None = None, behind_bytes: int = 0
    ) -> None:
        self.num_bytes = self.crc32 = 0
        self._checksum, self._most_cached_bytes = checksum, most_cached_bytes
        self._written_bytes = self._begun_bytes = self._flushed_bytes = 0
        self._file = path.open("xb", buffering=0)
        self._behind = WriteBehind(self._write, behind_bytes) if behind_bytes else None

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes. A memoryview must be contiguous bytes."""
        write, step = (self._behind.put, BEHIND_BLOCK_BYTES) if self._behind else (self._write, BLOCK_BYTES)
        view = memoryview(data)
        for begin in range(0, len(view), step):
            block = view[begin : begin + step]
            if self._checksum:
                self.crc32 = crc32(block, self.crc32)
            write(block)
            self.num_bytes += len(block)

    def write_tensor(self, values: Tensor) -> None:
        """Appends the bytes of a tensor's elements, from any device."""
        flat = values.detach().contiguous().view(-1)
        step = max(1, TAKEN_BYTES // flat.itemsize)
        for first in range(0, len(flat), step):
            self.write(flat[first : first + step].cpu().view(torch.uint8).numpy().data)

    def wait_for(self, num_bytes: int) -> None:
        """Waits until the first `num_bytes` of the file have left the caller's memory."""
        if self._behind is not None:
            self._behind.wait_for(num_bytes)

    def _write(self, block: memoryview) -> None:
        while len(block):
            written = self._file.write(block)
            assert written is not None, "the file waits"
            self._written_bytes, block = self._written_bytes + written, block[written:]
        if (unbegun := self._written_bytes - self._begun_bytes) >= OUT_BYTES:
            begin_writing_out(self._file.fileno(), self._begun_bytes, unbegun)
            self._begun_bytes = self._written_bytes
        unflushed = self._written_bytes - self._flushed_bytes
        if self._most_cached_bytes is not None and unflushed >= self._most_cached_bytes:
            self._flush()

    def _flush(self) -> None:
        """Makes written bytes durable. With `most_cached_bytes`, also drops them from the system's memory."""
        os.fsync(self._file.fileno())
        if self._most_cached_bytes is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed_bytes = self._written_bytes

    def close(self) -> None:
        """Makes the file durable and closes it."""
        with self._file:
            if self._behind is not None:
                self._behind.close()
            self._flush()

    def give_up(self) -> None:
        """Closes the file in its present state."""
        with self._file:
            if self._behind is not None:
                self._behind.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()
