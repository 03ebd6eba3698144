"""A process that imports the project once and forks Python processes from itself: `python -m tests.forked.zygote`.

Importing torch, Megatron and transformers takes seconds in every process; a fork takes milliseconds. The zygote listens
at the Unix socket given as its argument. Each connection requests one process: tests/forked/popen.py sends a JSON
object with the three standard streams. The zygote answers with the process id, and at the end with the exit status.

It has one thread, so no other thread holds a lock at a fork. It ends with its standard input.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rltrain.runtime.machine import has_ended, process_here
from tests.forked.namespaces import NAMESPACES, enter

PRELOADED = (
    "rltrain.training.megatron.backend",  # first: it loads Megatron without torch's compiler, as jobs do
    "rltrain.training.fsdp_backend",
    "rltrain.trainer",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "rltrain.cli.convert",
    "rltrain.planning.description",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.run",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
MAX_MESSAGE_BYTES = 2**20
RARE_COLLECTIONS = (20_000, 20, 20)
"""Thresholds of the garbage collector. The defaults took 6% of a job, because frozen objects do not count as old."""


@dataclass(frozen=True)
class Child:
    """A forked process, and the connection that requested it."""

    pid: int
    pidfd: int
    connection: socket.socket
    parent: int
    rank: str | None

    def report_end(self) -> None:
        """Sends the exit status to the requester. The process stays a zombie until the status has been read."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with suppress(OSError):  # the requester may have ended first
            self.connection.send(json.dumps({"code": code}).encode())

    def bury(self) -> None:
        os.waitpid(self.pid, 0)
        self.connection.close()
        os.close(self.pidfd)


class Zygote:
    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{path}.unheard")
        self.listener.listen(64)
        os.rename(f"{path}.unheard", path)  # the path appears only when connections are possible
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, self._end)
        self.selector.register(self.listener, selectors.EVENT_READ, self._answer)
        self.children: dict[int, Child] = {}
        self.request: dict[str, Any] | None = None

    def serve(self) -> dict[str, Any]:
        """Returns only in forked processes, with their requests."""
        while self.request is None:
            for key, _ in self.selector.select():
                key.data()
                if self.request is not None:
                    break
        return self.request

    def _answer(self) -> None:
        connection, _ = self.listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        if not message:
            connection.close()
            return
        request = json.loads(message)
        if "ranks_of" in request:
            of_parent = [child for child in self.children.values() if child.parent == request["ranks_of"]]
            connection.send(json.dumps({child.rank: child.pid for child in of_parent}).encode())
            connection.close()
            return
        self._fork(connection, request, streams)

    def _fork(self, connection: socket.socket, request: dict[str, Any], streams: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._leave_behind(connection)
            for standard, given in enumerate(streams):
                os.dup2(given, standard)
                os.close(given)
            self.request = request
            return
        for given in streams:
            os.close(given)
        pidfd = os.pidfd_open(pid)
        child = Child(pid, pidfd, connection, request["parent"], request["environment"].get("RANK"))
        self.children[pid] = child
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        connection.send(json.dumps({"pid": pid}).encode())

    def _ended(self, child: Child) -> None:
        self.selector.unregister(child.pidfd)
        child.report_end()
        self.selector.register(child.connection, selectors.EVENT_READ, lambda: self._was_read(child))

    def _was_read(self, child: Child) -> None:
        """The requester has closed its connection."""
        self.selector.unregister(child.connection)
        del self.children[child.pid]
        child.bury()

    def _leave_behind(self, connection: socket.socket) -> None:
        connection.close()
        for child in self.children.values():
            child.connection.close()
            os.close(child.pidfd)
        self.selector.close()
        self.listener.close()

    def _end(self) -> None:
        if os.read(0, 1) == b"":
            for pid in self.children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)


def become(request: dict[str, Any], prepare: Callable[[], None]) -> NoReturn:
    """Runs the requested Python command as a new interpreter would, and ends this process.

    Skips the interpreter's shutdown: freeing every module would copy the zygote's memory and take half a second.
    """
    try:
        _run(request, prepare)
        code = 0
    except SystemExit as exit_request:
        code = _exit_code(exit_request)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None or isinstance(exit_request.code, int):
        return (exit_request.code or 0) & 0xFF
    print(exit_request.code, file=sys.stderr)
    return 1


def _run(request: dict[str, Any], prepare: Callable[[], None]) -> None:
    if folder := request["environment"].get(NAMESPACES):
        enter(folder)
    if request["new_session"]:
        os.setsid()
    _have_parent(request["parent"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    command: list[str] = request["command"]
    if command[0] == "-u":
        command = command[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    own_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = own_path
    prepare()
    if command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[0]).resolve().parent)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def _have_parent(number: int) -> None:
    """Makes the requester the parent of this process, as if it had started it. Forks of this process are not
    affected."""
    child, kernels, parent = os.getpid(), os.getppid, process_here(number)
    os.getppid = lambda: kernels() if os.getpid() != child else 1 if has_ended(parent) else number


def _fork_ranks_too() -> None:
    """Makes a torchrun agent fork its ranks, and scripts fork their torchrun agents. Everything else is real."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from tests.forked.popen import AgentPopen, Popen

    subprocess_handler.Popen = Popen
    subprocess.Popen = AgentPopen  # type: ignore[misc]
    # The original searches all modules for names of methods in its log. This takes seconds with thousands of modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth - 1).f_code.co_name


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports started threads {threads}: forks would inherit their locks"


def prepare_forks(path: str, modules: Sequence[str]) -> None:
    """Imports `modules`. All forks share one copy of them."""
    gc.disable()
    try:
        _import_all(modules)
    except BaseException:
        shutil.rmtree(Path(path).parent)  # ends the waiting for the socket in it
        raise
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(*RARE_COLLECTIONS)


def main() -> None:
    prepare_forks(sys.argv[1], PRELOADED)
    become(Zygote(sys.argv[1]).serve(), _fork_ranks_too)


if __name__ == "__main__":
    main()
