"""Processes, threads and disks of this machine."""

import ctypes
import io
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from rltrain.runtime.whole_files import write_whole

# Whether a process of this machine still runs. Its name distinguishes it from processes of other machines.


@cache
def this_machine() -> str:
    """Returns the name of a space of process numbers, such as "node7 pid:[4026531836]". Empty if it is unknown."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_here(number: int) -> str:
    """Returns the name of a process of this machine."""
    return f"{this_machine()} {number}"


def this_process() -> str:
    return process_here(os.getpid())


def host_of(process: str) -> str:
    """Returns the host at the beginning of a process's name."""
    return process.partition(" ")[0]


def has_ended(process: str) -> bool:
    """Returns whether a process of this machine has ended. False if it cannot be seen from here."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != this_machine():
        return False
    try:
        after_name = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return after_name.split()[0] in ("Z", "X")  # dead, but its parent has not waited for it yet


@cache
def launcher() -> int:
    """Returns the number of the process that started this one. It is the parent at the first call."""
    return os.getppid()


def has_lost_launcher() -> bool:
    """Returns whether torchrun started this process and has ended. A rank started from a shell may outlive it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher()


# Processes that run users' code for a rank and end with it. Both ends of their start.

PR_SET_PDEATHSIG = 1
SIGNALS_OF_LAUNCHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Launchers send these to all processes of a rank. The rank may still need its workers before it ends."""


def start_worker(module: str) -> "subprocess.Popen[bytes]":
    """Starts `python -m module` in a new session, with unbuffered pipes to its standard input and output.

    It finds the same modules as this process. Linux kills it when the calling thread ends.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )


def kill_worker(process: "subprocess.Popen[bytes]") -> None:
    """Kills the worker and the processes that it has started. Those in another session survive."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def become_worker() -> tuple[io.FileIO, io.FileIO]:
    """Prepares this process as a worker. It must be the worker's first call.

    Returns (requests, answers): the original standard input and output, on private unbuffered descriptors. Users' code
    then reads an empty standard input, and prints to standard error. The worker ignores the signals of launchers, and
    dies with its parent.
    """
    for number in SIGNALS_OF_LAUNCHERS:
        signal.signal(number, _nothing)  # unlike SIG_IGN it is not inherited by processes of users' code
    die_with_parent()
    requests, answers = io.FileIO(os.dup(0), "rb"), io.FileIO(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, even during a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _nothing(number: int, frame: object) -> None:
    """A signal handler without effect."""


# Files for torchrun, the launcher of this rank.

logger = logging.getLogger(__name__)


def leave_for_launcher(summary: str) -> None:
    """Writes the error file of torchrun. Its summary shows the content as the traceback of the failed rank.

    The file appears whole. torchrun may kill this rank during the write, and half a file would make torchrun itself
    fail.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {"message": summary, "extraInfo": {"py_callstack": summary, "timestamp": str(int(time.time()))}}
    try:
        write_whole(Path(path), json.dumps({"message": content}))
    except OSError as error:
        logger.warning("cannot write %s, so torchrun's summary has no message: %s", path, error)


# Exceptions of users' code in words: what happened, where, and the traceback.

MAX_FRAMES = 20
MAX_ERROR_CHARS = 1000
MAX_TRACEBACK_CHARS = 8000


def describe_raised(error: BaseException, without: Collection[str]) -> tuple[str, str]:
    """Returns (the exception with the line of the user's file, the traceback).

    Leading frames in the files `without` are left out. The traceback is empty if no other frame is left.
    """
    raised = traceback.TracebackException.from_exception(error)
    while raised.stack and raised.stack[0].filename in without:
        del raised.stack[0]
    what = "".join(raised.format_exception_only()).strip()[:MAX_ERROR_CHARS]
    if not raised.stack:
        return what, ""
    own = next(frame for frame in reversed(raised.stack) if frame.filename == raised.stack[0].filename)
    place = f"{own.filename}, line {own.lineno}"
    raised.stack = traceback.StackSummary.from_list(raised.stack[-MAX_FRAMES:])
    return f"{what} ({place})", "".join(raised.format()).strip()[-MAX_TRACEBACK_CHARS:]


# Threads of this process that the job relies on. An error in one of them is never silent.


class JobThread(threading.Thread):
    """The only kind of thread that rltrain starts. An unhandled error in one ends the job."""


def end_job_by_threads(end: Callable[[str, BaseException], None]) -> None:
    """Makes a failing JobThread call `end(name of the thread, error)`, in that thread.

    Threads of libraries keep their behaviour: they print their error and end.
    """

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.thread, JobThread) and arguments.exc_value is not None:
            end(arguments.thread.name, arguments.exc_value)
        else:
            threading.__excepthook__(arguments)

    threading.excepthook = failed


# Freed memory in the C library.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

KEPT_BYTES = 256 * 2**20
LARGEST_KEPT_BYTES = 32 * 2**20
"""The largest limit that glibc accepts."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Makes this process keep up to 256 MB of freed memory for later allocations, in pieces of up to 32 MB.

    Otherwise the kernel supplies the tensors of each training step page by page and fills every page with zeros.
    Returns False if the C library is not glibc, or if the environment already sets one of VARIABLES.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


# Reasons why this node cannot write: read-only or full file systems, no shared memory.

SHARED_MEMORY = Path("/dev/shm")
LEAST_FREE_BYTES = 1 << 20
"""A file system with less free space is full. A run survives a checkpoint that does not fit, so that is not checked."""


def problems_of_disks(folders: Mapping[str, str]) -> Iterator[str]:
    """Yields the problems of `folders`: config key -> a folder for output. The folders need not exist."""
    for key, folder in folders.items():
        path = Path(folder).absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if reason := why_not_to_be_written(there):
            yield f"{key}: {there} {reason}"


def problems_of_shared_memory() -> Iterator[str]:
    """Yields the problems of shared memory. NCCL and SGLang's processes keep buffers there."""
    if not SHARED_MEMORY.is_dir():
        yield f"shared memory: there is no {SHARED_MEMORY}; in a container: --ipc host or --shm-size"
    elif reason := why_not_to_be_written(SHARED_MEMORY):
        yield f"shared memory: {SHARED_MEMORY} {reason}; in a container: --ipc host or --shm-size"


def why_not_to_be_written(folder: Path) -> str | None:
    """Returns the reason why this user cannot write to `folder`, or None if it can be written."""
    if not os.access(folder, os.W_OK):
        return "is read-only for this user"
    if (free := free_bytes(folder)) < LEAST_FREE_BYTES:
        return f"is full: {free / 1e6:.3g} MB free, expected {LEAST_FREE_BYTES / 1e6:.3g} MB or more"
    found = os.statvfs(folder)
    return "is full: it takes no more files" if found.f_files and not found.f_favail else None


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
