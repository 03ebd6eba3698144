"""Messages between processes, memory shared by them, and pages kept by the allocator."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rltrain.errors import StallError
from rltrain.reshard.native import Signal
from rltrain.runtime.machine import VARIABLES
from rltrain.runtime.messages import Connection, Message, MessageServer, PeerLost, connect
from rltrain.runtime.shared_memory import SharedMemory

LIMIT_S = 20.0


@pytest.fixture
def server():
    server = MessageServer("127.0.0.1", "secret")
    yield server
    server.close()


def received(
    server: MessageServer, is_enough: Callable[[list[tuple[int, Message]]], bool]
) -> list[tuple[int, Message]]:
    got: list[tuple[int, Message]] = []
    end = time.monotonic() + LIMIT_S
    while not is_enough(got):
        assert time.monotonic() < end, got
        got += server.receive(0.05)
    return got


def answer_to(client: Connection) -> Message:
    """Returns the next message. Fails if there are several."""
    end = time.monotonic() + LIMIT_S
    while not (messages := client.receive()):
        assert time.monotonic() < end
        time.sleep(0.002)
    (message,) = messages
    return message


def test_messages_come_in_order_and_answers_go_to_whoever_asked(server):
    first, second = (connect("127.0.0.1", server.port, "secret") for _ in range(2))
    for number in range(3):
        first.send({"number": number})
    second.send({"text": "déjà vu\n"})
    got = received(server, lambda got: len(got) == 4)
    by_peer = {peer: [message for who, message in got if who == peer] for peer, _ in got}
    assert sorted(map(str, by_peer.values())) == sorted(
        map(str, [[{"number": 0}, {"number": 1}, {"number": 2}], [{"text": "déjà vu\n"}]])
    )
    for who in by_peer:
        server.send(who, {"you": who})
    assert answer_to(first)["you"] != answer_to(second)["you"]


def test_nobody_waits_for_a_peer_that_does_not_read(server):
    slow = connect("127.0.0.1", server.port, "secret")
    slow.send({"hello": 1})
    ((peer, _),) = received(server, lambda got: len(got) == 1)
    text = "x" * 1_000_000
    for number in range(30):  # more than the system's buffers hold
        server.send(peer, {"number": number, "text": text})
    got: list[Message] = []
    end = time.monotonic() + LIMIT_S
    while len(got) < 30:
        assert time.monotonic() < end
        got += slow.receive()
        server.receive(0.001)
    assert [message["number"] for message in got] == [*range(30)]


@pytest.mark.parametrize(
    "sent",
    [b'{"token":"guess"}\n{"row":{}}\n', b"no json\n", b"[1]\n", b'{"row":{}}\n'],
    ids=["wrong token", "no JSON", "no object", "no token"],
)
def test_who_does_not_know_the_token_is_dropped(server, sent, caplog):
    caplog.set_level("DEBUG")
    stranger = socket.create_connection(("127.0.0.1", server.port))
    stranger.settimeout(LIMIT_S)
    stranger.sendall(sent)
    end = time.monotonic() + LIMIT_S
    stranger.setblocking(False)
    while time.monotonic() < end:
        assert server.receive(0.01) == []
        try:
            closed = stranger.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionError:
            closed = True
        assert closed
        break
    assert not caplog.records


def test_both_sides_notice_that_the_other_has_gone(server, caplog):
    caplog.set_level("DEBUG")
    client = connect("127.0.0.1", server.port, "secret")
    client.send({"hello": 1})
    ((peer, _),) = received(server, lambda got: len(got) == 1)
    client.close()
    end = time.monotonic() + LIMIT_S
    while "a connection was lost" not in caplog.text:
        assert time.monotonic() < end
        server.receive(0.05)
    server.send(peer, {"late": 1})
    port, other = server.port, connect("127.0.0.1", server.port, "secret")
    other.send({"hello": 2})
    received(server, lambda got: len(got) == 1)
    server.close()
    with pytest.raises(PeerLost):
        answer_to(other)
    with pytest.raises(StallError, match=f"no answer from 127.0.0.1:{port}"):
        connect("127.0.0.1", port, "secret")


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
    assert int(mapped.sum()) == 10, "mapped memory stays"


def test_what_no_process_has_open_cannot_be_opened() -> None:
    with pytest.raises(OSError):
        SharedMemory.open(os.getpid(), 10**6)
    with pytest.raises(OSError):
        SharedMemory.open(2**22 + 1, 3)


def test_what_is_no_such_memory_is_not_opened(tmp_path: Path) -> None:
    """In separate containers, another rank's process number can belong to a process with other files."""
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
    assert signal.wait(0, timeout_s=0), "the word already has this value"


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


PROGRAM = """
import ctypes, resource, sys
from rltrain.runtime.machine import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
libc, size = ctypes.CDLL(None), 8 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(size) for _ in range(4)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces:
        libc.free(piece)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **variables: str) -> tuple[str, int]:
    """Returns whether the process reports memory as kept, and the page faults of its third allocation of 32 MB."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PROGRAM, mode]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    kept, count = printed.split()
    return kept, int(count)


def test_freed_memory_is_kept() -> None:
    kept, count = faults("keep")
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert count < 100
    assert faults("leave")[1] > 1000


def test_what_the_environment_says_of_the_allocator_is_left_alone() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
