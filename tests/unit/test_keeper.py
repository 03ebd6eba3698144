"""The keeper of a sandbox ends programs at their limits and leaves nothing behind. Here it is a fork of the test's
process; test_sandbox.py starts it as jobs do."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rltrain.errors import SandboxError
from rltrain.sandbox import keeper
from rltrain.sandbox.limits import MIB, Limits
from rltrain.sandbox.sandbox import Sandbox
from tests.support.sandboxes import PROTECTING, new_mark, processes_with, sandbox_by

END_S = 30.0


class ForkedKeeper:
    """Stands in for the keeper's `subprocess.Popen`."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        self.process = multiprocessing.get_context("fork").Process(target=keep, args=(pass_fds[0], theirs, ours))
        self.process.start()
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(ours[0], "wb", 0),
            *(os.fdopen(one, "rb", 0) for one in ours[1:]),
        )

    def kill(self) -> None:
        """Waits for the end of the keeper, as it has told the program's."""
        self.process.join(END_S)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == 0

    def wait(self) -> None:
        self.process.join()


def keep(channel: int, streams: list[int], of_caller: list[int]) -> None:
    os.setsid()
    for descriptor in of_caller:
        os.close(descriptor)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    keeper.main(channel)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Sandbox]:
    """Returns a function that returns a sandbox whose keepers are forked."""

    def of_means(means: str) -> Sandbox:
        made = sandbox_by(means)
        monkeypatch.setattr(subprocess, "Popen", ForkedKeeper)
        return made

    return of_means


@pytest.fixture(params=[*PROTECTING, "none"])
def sandbox(request: pytest.FixtureRequest, forked: Callable[[str], Sandbox]) -> Sandbox:
    return forked(request.param)


def test_a_program_gets_its_files_and_its_status_is_told(sandbox: Sandbox) -> None:
    program = "import sys; print(open('a/b').read(), sys.stdin.read()); print('error', file=sys.stderr); sys.exit(3)"
    outcome = sandbox.run_python(program, files={"a/b": b"data"}, stdin=b"input")
    assert (outcome.stdout, outcome.stderr) == (b"data input\n", b"error\n")
    assert (outcome.status, outcome.ended_by) == (3, None)


@pytest.mark.parametrize("means", PROTECTING)
def test_one_port_of_the_machine_is_reached(forked: Callable[[str], Sandbox], means: str) -> None:
    program = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connected:
    connected.sendall(b"question")
    print(connected.recv(100).decode())
"""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as executor:

        def answer() -> bytes:
            connected, _ = server.accept()
            with connected:
                asked = connected.recv(100)
                connected.sendall(b"answer")
            return asked

        answered = executor.submit(answer)
        port = server.getsockname()[1]
        sandbox = forked(means)
        found = sandbox.run([sandbox.python, "-c", program, str(port)], host_port=port)
        assert found.stdout == b"answer\n", found.stderr
        assert answered.result(END_S) == b"question"


@pytest.mark.parametrize(
    ("program", "limits", "reason"),
    [
        ("import time; time.sleep(600)", Limits(wall_s=0.2), "time"),
        ("while True: pass", Limits(cpu_s=0.1), "cpu"),
        (
            "import time, threading\nfor _ in range(9): threading.Thread(target=time.sleep, args=(600,)).start()",
            Limits(num_processes=6),
            "processes",
        ),
        (
            "import os, time\nfor _ in range(3):\n  if os.fork() == 0: break\nheld = b'x' * 2**25\ntime.sleep(600)",
            Limits(memory_bytes=80 * MIB),
            "memory",
        ),
        ("print('x' * 2000, flush=True)\nimport time; time.sleep(600)", Limits(output_bytes=1000), "output"),
    ],
)
def test_a_program_and_all_its_processes_end_at_a_limit(
    forked: Callable[[str], Sandbox], program: str, limits: Limits, reason: str
) -> None:
    mark = new_mark()
    outcome = forked("none").run_python(program, [mark], limits=limits)
    assert (outcome.ended_by, outcome.status) == (reason, -signal.SIGKILL)
    assert processes_with(mark) == []


def test_what_cannot_start_is_told(forked: Callable[[str], Sandbox]) -> None:
    unprotected = forked("none")
    with pytest.raises(SandboxError, match="cannot start: .*File exists: '/tmp/.*/a'"):
        unprotected.run([unprotected.python], files={"a": b"", "a/b": b""})


def test_shared_memory_counts_once() -> None:
    """The sum over two processes is at most their resident bytes, and as much as they hold alone."""
    held = "import mmap, os, sys\nm = mmap.mmap(-1, 2**25); m.write(b'x' * 2**25)\nif os.fork(): os.wait()\n"
    held += "else: m.read(0); sum(m[::4096]); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline() == b"ready\n"
        both = keeper.descendants(os.getpid())
        assert started.pid in both
        both = [started.pid, *keeper.descendants(started.pid)]
        assert len(both) == 2 and keeper.descendants(both[1]) == []
        used = keeper.usage(both)
        assert used.num_tasks == 2 and used.cpu_s > 0
        assert used.resident_bytes > 2 * 2**25 > keeper.memory_bytes(both) > 2**25
    assert keeper.usage(both).num_tasks == 0 and keeper.memory_bytes(both) == 0 and keeper.descendants(both[0]) == []
