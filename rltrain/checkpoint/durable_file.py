"""Writes a file once, fast, and has the disk take it."""

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

# Blocks are written in their order by a thread, while whoever makes them makes the next ones.
#
# Writing to a file takes about as long as making what goes into it, by mapping pages, checksums, casts or a reshard,
# and neither holds up other threads. One thread writes a file: systems let no two write to one at a time.


class WriteBehind:
    """Has `write` called with every block from a thread, of which at most `most_bytes` wait for it, or one block.

    `put`, `wait_for` and `close` raise what `write` raised; no further block is written then. `close` or `give_up` ends
    the thread, which leaves as much of the processors to others as the one that began it does.
    """

    def __init__(self, write: Callable[[memoryview], None], most_bytes: int) -> None:
        self._write, self._most_bytes = write, most_bytes
        self._waiting: deque[memoryview] = deque()
        self._given_bytes = self._written_bytes = 0
        self._closing = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        # A daemon, for a file that nobody closes, nor misses, as after an error.
        self._thread = JobThread(target=self._write_blocks, name="file writer", daemon=True)
        self._thread.start()

    def put(self, block: memoryview) -> None:
        """Contiguous bytes, which nobody may change before they are written. Waits for room."""
        self.wait_for(self._given_bytes + len(block) - self._most_bytes)
        with self._changed:
            self._given_bytes += len(block)
            self._waiting.append(block)
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Until the first `num_bytes` of all that was put, or all of it, are written."""
        needed = min(num_bytes, self._given_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._written_bytes >= needed or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Once all is written."""
        try:
            self.wait_for(self._given_bytes)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """What waits is not written."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _write_blocks(self) -> None:
        while (block := self._next()) is not None:
            try:
                self._write(block)
            except Exception as failure:  # raised where the next block is put, or the file is closed
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


# What Linux is told of the pages of files: to map many at once, and to write them out while more is written.
#
# Elsewhere, and on kernels that do not know a call, nothing is done, and pages come and go one after the other.

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


# A file that is written once, from its beginning to its end, as fast as memory and disk allow, and durable then.

BLOCK_BYTES = 2**18
"""Written at a time: few enough to be in a core's own cache still after their checksum was made."""
BEHIND_BLOCK_BYTES = 2**20
"""Written at a time by a thread: enough that a turn of threads takes a small part of that time."""
TAKEN_BYTES = 8 * 2**20
"""Brought to the host at a time, into memory that the next ones are given again."""
BEHIND_BYTES = 4 * 2**20
"""May wait for a thread where what is written is made bit by bit: few enough to be in the processor's caches still."""
OUT_BYTES = 16 * 2**20
"""After so many the disk begins with them."""


class DurableFile:
    """A new file; as a context manager it is complete and durable when its block ends without an error.

    `num_bytes` were given to it so far; with `checksum` `crc32` is zlib's of them, or of those since it was set to 0.
    With `most_cached_bytes` no more than so many wait for the disk in memory that others may need, or stay there:
    writing then takes as long as the disk does. With `behind_bytes` a thread writes, for which so many may wait: what
    they lie in may not change before `wait_for`. FileExistsError where there is such a file, OSError where writing
    fails, where a thread writes by one of the calls after it.
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
        """Append; a memoryview is contiguous bytes."""
        write, step = (self._behind.put, BEHIND_BLOCK_BYTES) if self._behind else (self._write, BLOCK_BYTES)
        view = memoryview(data)
        for begin in range(0, len(view), step):
            block = view[begin : begin + step]
            if self._checksum:
                self.crc32 = crc32(block, self.crc32)
            write(block)
            self.num_bytes += len(block)

    def write_tensor(self, values: Tensor) -> None:
        """Append the bytes of its elements, wherever they lie."""
        flat = values.detach().contiguous().view(-1)
        step = max(1, TAKEN_BYTES // flat.itemsize)
        for first in range(0, len(flat), step):
            self.write(flat[first : first + step].cpu().view(torch.uint8).numpy().data)

    def wait_for(self, num_bytes: int) -> None:
        """Until so many bytes of the file have left the memory that they were given in."""
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
        """Have the disk take what was written, and where asked for no memory keep it."""
        os.fsync(self._file.fileno())
        if self._most_cached_bytes is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed_bytes = self._written_bytes

    def close(self) -> None:
        """Make it durable."""
        with self._file:
            if self._behind is not None:
                self._behind.close()
            self._flush()

    def give_up(self) -> None:
        """Leave it as it is."""
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
