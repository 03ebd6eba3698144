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

# Whether a process of this machine still runs, by a name that tells it from those of other machines.


@cache
def this_machine() -> str:
    """Where process numbers mean the same: such as "node7 pid:[4026531836]". Empty where the system does not tell."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_here(number: int) -> str:
    """The name of a process of this machine."""
    return f"{this_machine()} {number}"


def this_process() -> str:
    return process_here(os.getpid())


def host_of(process: str) -> str:
    """The host that the name of a process begins with."""
    return process.partition(" ")[0]


def has_ended(process: str) -> bool:
    """Whether it was one of this machine and runs no more. False where that cannot be seen from here."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != this_machine():
        return False
    try:
        after_name = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return after_name.split()[0] in ("Z", "X")  # dead, and not yet waited for by its parent


@cache
def launcher() -> int:
    """The process that has started this one: its parent, at the first call."""
    return os.getppid()


def has_lost_launcher() -> bool:
    """Whether that was torchrun, which has ended, and another process has taken over this one. Who starts a single rank
    from a shell may leave it behind."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher()


# Processes that run users' code for a rank, and end with it: both ends of how they are started.

PR_SET_PDEATHSIG = 1
SIGNALS_OF_LAUNCHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A launcher sends them to all processes of a rank; the rank may still need its workers before it ends."""


def start_worker(module: str) -> "subprocess.Popen[bytes]":
    """`python -m module`, with pipes without buffers to its standard input and output, in a session of its own.

    It finds the modules that this process finds. Linux kills it when the thread that called this ends.
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
    """With the processes that it has started, but for those that left its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def become_worker() -> tuple[io.FileIO, io.FileIO]:
    """In the worker, first of all: (requests, answers) on private descriptors, without buffers.

    What users' code reads from standard input is empty, and what it prints goes to standard error.
    """
    for number in SIGNALS_OF_LAUNCHERS:
        signal.signal(number, _nothing)  # unlike SIG_IGN it is not passed on to the processes that users' code starts
    die_with_parent()
    requests, answers = io.FileIO(os.dup(0), "rb"), io.FileIO(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, also in the middle of a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _nothing(number: int, frame: object) -> None:
    """A handler."""


# What a rank leaves for torchrun, which has started it.

logger = logging.getLogger(__name__)


def leave_for_launcher(summary: str) -> None:
    """Writes the file from which torchrun takes what it shows as a failed rank's traceback, at the end of its summary.

    The file appears at once: torchrun may kill this rank meanwhile, and half a file would make it fail itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {"message": summary, "extraInfo": {"py_callstack": summary, "timestamp": str(int(time.time()))}}
    try:
        write_whole(Path(path), json.dumps({"message": content}))
    except OSError as error:
        logger.warning("cannot write %s, so torchrun's summary has no message: %s", path, error)


# An exception of a user's code in words: what, where, and the way there.

MAX_FRAMES = 20
MAX_ERROR_CHARS = 1000
MAX_TRACEBACK_CHARS = 8000


def describe_raised(error: BaseException, without: Collection[str]) -> tuple[str, str]:
    """(what was raised and at which line of the user's file, the traceback), without the frames at the beginning that
    are in the files `without`. The traceback is empty where nothing else is left."""
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


# Threads of this process that the job relies on: none of them ends by an error in silence.


class JobThread(threading.Thread):
    """The only kind that rltrain starts. An error that it does not handle itself ends the job."""


def end_job_by_threads(end: Callable[[str, BaseException], None]) -> None:
    """From now on call `end(name of the thread, error)`, from that thread, where a JobThread fails.

    Threads of libraries are left as they are: they print their error and end.
    """

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if isinstance(arguments.thread, JobThread) and arguments.exc_value is not None:
            end(arguments.thread.name, arguments.exc_value)
        else:
            threading.__excepthook__(arguments)

    threading.excepthook = failed


# What the C library does with memory that is freed.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""

KEPT_BYTES = 256 * 2**20
LARGEST_KEPT_BYTES = 32 * 2**20
"""glibc takes no larger limit."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep up to 256 MB of what it frees for what it allocates next, in pieces of up to 32 MB; False
    where the C library is not glibc, or the environment says what it does.

    Else tensors of a training step come from the kernel anew, page by page, which fills each with zeros.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


# What keeps this node from writing: read-only or full file systems, no shared memory.

SHARED_MEMORY = Path("/dev/shm")
LEAST_FREE_BYTES = 1 << 20
"""Less is full. Whether a checkpoint fits shows when it is written, which a run survives."""


def problems_of_disks(folders: Mapping[str, str]) -> Iterator[str]:
    """`folders`: config key -> a folder that the job writes to, which need not be there yet."""
    for key, folder in folders.items():
        path = Path(folder).absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if reason := why_not_to_be_written(there):
            yield f"{key}: {there} {reason}"


def problems_of_shared_memory() -> Iterator[str]:
    """NCCL and SGLang's processes keep buffers there."""
    if not SHARED_MEMORY.is_dir():
        yield f"shared memory: there is no {SHARED_MEMORY}; in a container: --ipc host or --shm-size"
    elif reason := why_not_to_be_written(SHARED_MEMORY):
        yield f"shared memory: {SHARED_MEMORY} {reason}; in a container: --ipc host or --shm-size"


def why_not_to_be_written(folder: Path) -> str | None:
    """None where this user can write to it."""
    if not os.access(folder, os.W_OK):
        return "is read-only for this user"
    if (free := free_bytes(folder)) < LEAST_FREE_BYTES:
        return f"is full: {free / 1e6:.3g} MB free, expected {LEAST_FREE_BYTES / 1e6:.3g} MB or more"
    found = os.statvfs(folder)
    return "is full: it takes no more files" if found.f_files and not found.f_favail else None


def free_bytes(folder: Path) -> int:
    """Which this user may fill."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
