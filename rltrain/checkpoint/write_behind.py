"""Blocks are written in their order by a thread, while whoever makes them makes the next ones.

Writing to a file takes about as long as making what goes into it, by mapping pages, checksums, casts or a reshard, and
neither holds up other threads. One thread writes a file: systems let no two write to one at a time.
"""

import threading
from collections import deque
from collections.abc import Callable

from rltrain.runtime.machine import JobThread


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
