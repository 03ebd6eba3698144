"""Blocks that a thread writes while the next ones are made."""

import errno
import threading
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.durable_file import WriteBehind


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), most_bytes=st.integers(1, 20))
def test_blocks_are_written_in_their_order_and_few_wait(sizes: list[int], most_bytes: int) -> None:
    written = bytearray()
    behind = WriteBehind(written.extend, most_bytes)
    given_bytes = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        behind.put(memoryview(given_bytes)[stop - size : stop])
        assert stop - len(written) <= max(most_bytes, size)
    behind.wait_for(len(given_bytes) // 2)
    assert len(written) >= len(given_bytes) // 2
    behind.close()
    assert written == given_bytes and not behind._thread.is_alive()


class Disk:
    """Takes a block when it is told to, and is full after `room` blocks."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, list[bytes]()
        self.may_take = threading.Semaphore(0)

    def write(self, block: memoryview) -> None:
        assert self.may_take.acquire(timeout=60)
        if len(self.taken) == self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken.append(bytes(block))


@pytest.mark.parametrize("call", ["put", "wait_for", "close"])
def test_what_the_thread_failed_with_is_raised_and_no_more_is_written(call: str) -> None:
    disk = Disk(room=1)
    behind = WriteBehind(disk.write, 3)
    for block in (b"a", b"b", b"c"):
        behind.put(memoryview(block))
    disk.may_take.release(9)
    calls = {"put": lambda: behind.put(memoryview(b"d" * 9)), "wait_for": lambda: behind.wait_for(2)}
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            calls.get(call, behind.close)()
    behind.give_up()
    assert disk.taken == [b"a"] and not behind._thread.is_alive()


def test_what_is_given_up_is_not_written() -> None:
    disk = Disk(room=9)
    behind = WriteBehind(disk.write, 3)
    for block in (b"a", b"b", b"c"):
        behind.put(memoryview(block))
    threading.Timer(0.05, disk.may_take.release, [9]).start()
    behind.give_up()
    assert disk.taken in ([], [b"a"]) and not behind._thread.is_alive()
