"""subprocess.Popen and subprocess.run for Python processes forked from the zygote. See zygote.py."""

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
"""Environment variable with the socket of the zygote. Forked processes use the same zygote."""

SETTING = "RLTRAIN_TEST_FORK"
"""Environment variable; with "off" every process is started as users start it."""

START_TIMEOUT_S = 120.0
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Without this, pyarrow's allocator would have a thread in the zygote."""

PYTHON_PATH = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
"""The project comes first, then this process's own path: on a machine without a network it may have the packages."""
FORKED_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}


def forks() -> bool:
    """Returns whether processes are forked here. A process that has used its GPUs cannot use them after a fork."""
    return os.environ.get(SETTING) != "off" and not Path("/dev/nvidiactl").exists()


def is_forkable(args: Any) -> bool:
    """Returns whether the command is Python with a script or a module, not with program text."""
    is_python = isinstance(args, (list, tuple)) and len(args) > 1 and args[0] == sys.executable
    return forks() and is_python and (args[1] in ("-u", "-m") or not str(args[1]).startswith("-"))


class Popen(subprocess.Popen[Any]):
    """A subprocess.Popen that forks [sys.executable, ("-u",) SCRIPT or "-m" MODULE, ...] and starts all other commands.

    The parent of a forked process is the zygote. Process id, exit status and signals work as for a child.
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
    """Forks only torchrun's agents, for scripts that start jobs."""

    @staticmethod
    def forkable(args: Any) -> bool:
        return is_forkable(args) and list(args[1:3]) == ["-m", "torch.distributed.run"]


def run(
    command: list[str], timeout_s: float, environment: dict[str, str] | None = None, folder: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Runs a forked process like subprocess.run. Exit status and output are those of the process, as text."""
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
    """Returns the output of a test module in a started, not forked, process. It must succeed."""
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
    """Returns rank -> process id, of the running ranks forked for the process `agent`."""
    with ask(address(), {"ranks_of": agent}, []) as asked:
        found = json.loads(asked.recv(65536))
    return {int(rank): pid for rank, pid in found.items() if rank != "null"}


def address() -> str:
    """Returns the address of this process's zygote. It is started at the first use and ends with this process."""
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
    """Sends a request to the zygote at `path` and returns the connection for its answers."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    asked.connect(path)
    socket.send_fds(asked, [json.dumps(request).encode()], streams)
    return asked


def start_zygote() -> None:
    """Starts a zygote for this process and its later children. `address` waits until it accepts requests."""
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
        if not Path(path).exists():  # it does not read its standard input yet
            zygote.kill()
        assert zygote.stdin is not None
        zygote.stdin.close()
        zygote.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
