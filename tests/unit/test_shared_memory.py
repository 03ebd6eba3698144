"""Memory that processes share, and the counters in it."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rltrain.reshard.native import Signal
from rltrain.runtime.shared_memory import SharedMemory

CHILD = """
import sys
import numpy as np
from rltrain.runtime.shared_memory import SharedMemory
from rltrain.reshard.native import Signal

memory = SharedMemory.open(int(sys.argv[1]), int(sys.argv[2]))
bytes = memory.map()
memory.close()
words = bytes[:64].numpy().view(np.uint32)
assert Signal(words, 0).wait(7, timeout_s=30)
bytes[64:] += bytes[64:]
Signal(words, 1).set(1)
"""


def test_another_process_reads_and_writes_what_lies_there_and_each_waits_for_the_other() -> None:
    memory = SharedMemory.create()
    memory.resize(64 + 1000)
    mapped = memory.map()
    words = mapped[:64].numpy().view(np.uint32)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(os.getpid()), str(memory.file)]) as child:
        mapped[64:] = 3
        Signal(words, 0).set(7)
        assert Signal(words, 1).wait(1, timeout_s=60)
        assert torch.equal(mapped[64:], torch.full((1000,), 6, dtype=torch.uint8))
        assert child.wait(30) == 0


def test_memory_is_nobody_elses_and_gone_with_what_holds_it() -> None:
    memory = SharedMemory.create()
    memory.resize(10)
    assert os.stat(memory.path).st_mode & 0o777 == 0o600
    mapped, path = memory.map(), memory.path
    again = SharedMemory.open(os.getpid(), memory.file)
    assert again.num_bytes == 10
    again.close()
    memory.close()
    assert not os.path.exists(path)
    mapped[:] = 1
    assert int(mapped.sum()) == 10, "what is mapped stays"


def test_what_no_process_has_open_cannot_be_opened() -> None:
    with pytest.raises(OSError):
        SharedMemory.open(os.getpid(), 10**6)
    with pytest.raises(OSError):
        SharedMemory.open(2**22 + 1, 3)


def test_what_is_no_such_memory_is_not_opened(tmp_path: Path) -> None:
    """Where ranks are in containers of their own, another's number may be that of a process with other files."""
    reader, writer = os.pipe()
    with socket.socket() as listener, (tmp_path / "file").open("w+") as file:
        for number in (reader, writer, listener.fileno(), file.fileno()):
            with pytest.raises(OSError, match="expected memory that rltrain shares"):
                SharedMemory.open(os.getpid(), number)
    os.close(reader)
    os.close(writer)


def test_a_word_that_does_not_come_to_a_value_is_waited_for_no_longer_than_said() -> None:
    signal = Signal(np.zeros(1, dtype=np.uint32), 0)
    begin = time.monotonic()
    assert not signal.wait(1, timeout_s=0.1)
    assert 0.1 <= time.monotonic() - begin < 5
    assert signal.wait(0, timeout_s=0), "it has come to this already"


def test_words_count_around() -> None:
    signal = Signal(np.zeros(1, dtype=np.uint32), 0)
    signal.set(2**32 - 2)
    assert signal.wait(2**32 - 2, timeout_s=0)
    assert not signal.wait(2**32 + 1, timeout_s=0), "three further"
    signal.set(2**32 + 1)
    assert signal.wait(2**32 - 2, timeout_s=0) and signal.wait(2**32 + 1, timeout_s=0)


def test_who_sleeps_is_woken() -> None:
    words = np.zeros(32, dtype=np.uint32)
    there, back = Signal(words, 0), Signal(words, 16)

    def answer() -> None:
        for number in range(1, 201):
            time.sleep(0.0005)  # longer than a waiter spins
            assert there.wait(number, timeout_s=30)
            back.set(number)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(1, 201):
        there.set(number)
        assert back.wait(number, timeout_s=30)
    thread.join()
    assert words[[0, 16]].tolist() == [200, 200]
