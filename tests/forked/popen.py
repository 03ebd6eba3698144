"""subprocess.Popen and subprocess.run for Python processes that are forked from the zygote: see zygote.py."""

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESS = "RLTRAIN_TEST_ZYGOTE"
"""Environment variable with the socket of the zygote: the processes that it forks ask the same one for theirs."""

SETTING = "RLTRAIN_TEST_FORK"
"""Environment variable; "off": every process is started as a user starts it."""

START_TIMEOUT_S = 120.0
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""pyarrow's allocator would have one in the zygote."""

PYTHON_PATH = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
"""The project before what this process has been given: on a machine without a network its packages may lie there."""
FORKED_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}


def forks() -> bool:
    """Whether processes are forked here. One that has asked for its GPUs cannot use them after a fork."""
    return os.environ.get(SETTING) != "off" and not Path("/dev/nvidiactl").exists()


def is_forkable(args: Any) -> bool:
    """Whether the command is Python's, and no program in its argument."""
    is_python = isinstance(args, (list, tuple)) and len(args) > 1 and args[0] == sys.executable
    return forks() and is_python and (args[1] in ("-u", "-m") or not str(args[1]).startswith("-"))


class Popen(subprocess.Popen[Any]):
    """As subprocess.Popen: [sys.executable, ("-u",) SCRIPT or "-m" MODULE, ...] is forked, anything else is started.

    Its parent is the zygote; its number, its exit status and what signals do to it are as for a child.
    """

    _asked: socket.socket | None = None
    forkable = staticmethod(is_forkable)

    def __init__(self, args: Any, *, start_new_session: bool = False, **options: Any) -> None:
        self._new_session = start_new_session
        super().__init__(args, start_new_session=start_new_session, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if not self.forkable(args):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        _, _, _, _, folder, environment, _, _, _, stdin, to_stdin, of_stdout, stdout, of_stderr, stderr, *_ = rest
        request = {
            "command": [str(argument) for argument in args[1:]],
            "folder": str(folder or os.getcwd()),
            "environment": {**(os.environ if environment is None else environment), ADDRESS: address()},
            "new_session": self._new_session,
            "parent": os.getpid(),
        }
        streams = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        self._asked = ask(address(), request, streams)
        self.pid = json.loads(self._asked.recv(1024))["pid"]
        self._child_created = True
        self._close_pipe_fds(stdin, to_stdin, of_stdout, stdout, of_stderr, stderr)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self._asked is None:
            return super()._internal_poll(*_, **__)  # type: ignore[misc, no-any-return]
        self._take_code(timeout_s=0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._asked is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        self._take_code(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _take_code(self, timeout_s: float | None) -> None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and select.select([self._asked], [], [], timeout_s)[0]:
                assert self._asked is not None
                message = self._asked.recv(1024)
                self._asked.close()
                if not message:
                    raise ChildProcessError("the zygote that forked this process is gone")
                self.returncode = json.loads(message)["code"]


class AgentPopen(Popen):
    """Forks torchrun's agents alone: what scripts start that start jobs."""

    @staticmethod
    def forkable(args: Any) -> bool:
        return is_forkable(args) and list(args[1:3]) == ["-m", "torch.distributed.run"]


def run(
    command: list[str], timeout_s: float, environment: dict[str, str] | None = None, folder: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """subprocess.run of a forked process: exit status and output, as text."""
    with Popen(
        command,
        cwd=folder,
        env={**os.environ, **FORKED_ENVIRONMENT, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_module(module: str, *arguments: str, timeout_s: float = 120, **environment: str) -> str:
    """What a module of tests prints in a process of its own, which is started, not forked, and must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def ranks_of(agent: int) -> dict[int, int]:
    """rank -> number of its process, of the ranks that the process `agent` has had forked and that still run."""
    with ask(address(), {"ranks_of": agent}, []) as asked:
        found = json.loads(asked.recv(65536))
    return {int(rank): pid for rank, pid in found.items() if rank != "null"}


def address() -> str:
    """Of this process's zygote, which is started when it is first needed and ends with it."""
    if ADDRESS not in os.environ:
        start_zygote()
    path = Path(os.environ[ADDRESS])
    deadline = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        assert path.parent.exists(), "the zygote ended at its start: see its message above"
        assert time.monotonic() < deadline, f"the zygote has not started in {START_TIMEOUT_S} s"
        time.sleep(0.02)
    return str(path)


def ask(path: str, request: dict[str, Any], streams: list[int]) -> socket.socket:
    """The connection over which the zygote at `path` answers."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    asked.connect(path)
    socket.send_fds(asked, [json.dumps(request).encode()], streams)
    return asked


def start_zygote() -> None:
    """For this process and those that it starts from now on. `address` waits until it can be asked."""
    folder = tempfile.mkdtemp(prefix="zygote-")
    path = f"{folder}/socket"
    zygote = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.forked.zygote", path],
        cwd=REPOSITORY,
        env={**os.environ, **FORKED_ENVIRONMENT, **NO_THREADS},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[ADDRESS] = path

    def end() -> None:
        if not Path(path).exists():  # it has not begun to look at its standard input
            zygote.kill()
        assert zygote.stdin is not None
        zygote.stdin.close()
        zygote.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
