"""Runs a command, and ends it with all its descendants when it ends, on a signal, or when the parent dies.

    python rltrain_supervise.py PARENT_PID COMMAND...

A rank can be killed by SIGKILL, and a surviving server would hold the devices of the next run. So the kernel signals
this process at its parent's death, and makes it the new parent of orphaned descendants. That includes processes in
other sessions and process groups. Imports only the standard library.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
POLL_S = 0.02


def prctl(option: int, argument: int) -> None:
    """Calls Linux's prctl. Raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument})")


def descendants(root: int) -> list[int]:
    """Returns the ids of all running descendants of process `root`, without zombies."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The fields after the name are state and parent. The name ends at the last parenthesis.
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    queue = [root]
    while queue:
        queue += (new := children.get(queue.pop(), []))
        found += new
    return found


def reap() -> dict[int, int] | None:
    """Returns the wait statuses of ended children by process id, or None if there are no children left."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = status


def kill_all() -> None:
    """Kills all descendants until none is left, including those started meanwhile."""
    while reap() is not None:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def start(command: list[str], temporary: str) -> subprocess.Popen[bytes]:
    """Starts the command. It dies with this process if that is killed by SIGKILL."""

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS | {signal.SIGCHLD})
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    environment = {**os.environ, "TMPDIR": temporary}
    return subprocess.Popen(command, env=environment, preexec_fn=in_child)


def watch(server: subprocess.Popen[bytes], parent: int) -> int:
    """Waits until the server ends or a signal arrives. Returns the exit status, or 128 + the signal's number."""
    while os.getppid() == parent:
        number = signal.sigwait(STOPS | {signal.SIGCHLD})
        if number in STOPS:
            return 128 + number
        status = (reap() or {}).get(server.pid)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
    return 128 + signal.SIGTERM  # the parent died before the prctl


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS | {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent's SIG_IGN would be inherited
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    temporary = tempfile.mkdtemp(prefix="rltrain-sglang-")
    try:
        status = watch(start(command, temporary), parent)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        status = 127
    finally:
        kill_all()
        shutil.rmtree(temporary, ignore_errors=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
