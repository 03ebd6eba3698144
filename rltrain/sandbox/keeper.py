"""The keeper of a sandbox, a process outside it. It starts the program, measures its usage, and leaves no process
behind.

It ends the program at a limit, on the caller's request, and if the caller is gone. If the keeper is killed, the kernel
kills process 1 of the sandbox and all others with it.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from rltrain.sandbox import first_process, limits, root_file_system
from rltrain.sandbox.first_process import Report, be_first_process
from rltrain.sandbox.limits import write_files
from rltrain.sandbox.process_limit import ProcessLimit
from rltrain.sandbox.system_calls import NEW_NAMESPACES, PR_SET_CHILD_SUBREAPER, clone, process_control

if TYPE_CHECKING:
    from rltrain.sandbox.relay import Relay

# The usage of a process and all its descendants, from /proc.

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """The usage of a tree of processes at one moment."""

    def __init__(self) -> None:
        self.num_tasks = 0
        """Number of processes and threads."""
        self.cpu_s = 0.0
        """CPU seconds of running processes and of children they have waited for."""
        self.resident_bytes = 0
        """Resident bytes of all processes. Shared memory counts for each of them."""


def descendants(root: int) -> list[int]:
    """Returns the ids of all descendants of process `root`, parents before their children."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(process: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            found += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    except (FileNotFoundError, ProcessLookupError):  # it has ended, and its children have another parent
        pass
    return found


def usage(processes: list[int]) -> Usage:
    """Returns the usage of the processes that still exist."""
    total = Usage()
    for process in processes:
        try:
            # The name can contain anything, but ends at the last parenthesis.
            fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        user, system, waited_user, waited_system, _, _, num_threads = map(int, fields[11:18])
        total.num_tasks += num_threads
        total.cpu_s += (user + system + waited_user + waited_system) / TICKS_PER_S
        total.resident_bytes += int(fields[21]) * PAGE_BYTES
    return total


def memory_bytes(processes: list[int]) -> int:
    """Returns the memory of all processes. Shared memory counts once, so it is at most the resident bytes of `usage`.
    Slower than `usage`."""
    total = 0
    for process in processes:
        try:
            lines = _read(f"/proc/{process}/smaps_rollup").splitlines()
        except OSError:  # it has ended, or has no memory left
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


# The start of a program by one of the means.

UID_INSIDE = 1000
"""The program's user in a new user namespace."""
NOBODY = 65534
"""The program's user on the machine, if this process may choose one."""
MOST_OTHER_PROCESSES = 5
"""Processes besides the program's: bubblewrap's two, this one and its helper during the start, and one to exceed the
limit visibly."""


class Started:
    """A running program."""

    def __init__(self, process: int, num_own_processes: int) -> None:
        self.process = process
        """A child of this process. The program has ended when it ends."""
        self.num_own_processes = num_own_processes
        """Number of started processes outside the program."""
        self.to_first: socket.socket | None = None
        """A socket to process 1 of the sandbox. It sends the program's wait status."""
        self.relay: Relay | None = None
        self.folder: str | None = None
        """A folder to remove after the end of the program."""
        self.is_counted_by_user = False
        """True if the kernel counts the program's processes per user namespace."""

    def final_status(self, statuses: dict[int, int]) -> int:
        """Returns the exit status, or the negative number of the fatal signal, as in subprocess."""
        status = statuses.get(self.process, signal.SIGKILL)
        if self.to_first is not None:
            said = first_process.receive_status(self.to_first.fileno())
            status = signal.SIGKILL if said is None else said
        return os.waitstatus_to_exitcode(status)

    def remove_folder(self) -> None:
        if self.folder is not None:
            import shutil  # slow to import, and rarely needed

            shutil.rmtree(self.folder, ignore_errors=True)


def start(spec: dict[str, Any], contents: list[bytes], report: Report) -> Started:
    """Starts a program by spec["means"]. This process's standard streams become the program's. Raises OSError if it
    fails."""
    starters = {"kernel": _in_namespaces, "bubblewrap": _in_bubblewrap, "none": _unprotected}
    started = starters[spec["means"]](spec, contents, report)
    with contextlib.suppress(OSError), open(f"/proc/{started.process}/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel's first choice if memory runs out
    return started


def _unprotected(spec: dict[str, Any], contents: list[bytes], report: Report) -> Started:
    os.mkdir(spec["folder"], mode=0o700)
    write_files(spec["folder"], spec["files"], contents)
    started = Started(first_process.start(spec, (0, 1, 2), spec["folder"], report), num_own_processes=0)
    started.folder = spec["folder"]
    return started


def _in_bubblewrap(spec: dict[str, Any], contents: list[bytes], report: Report) -> Started:
    pause = root_file_system.Pause() if spec["host_port"] is not None else None
    command, descriptors = root_file_system.command(spec, contents, pause)
    process = first_process.start({**spec, "command": command, "descriptors": descriptors}, (0, 1, 2), "/", report)
    for descriptor in descriptors:
        os.close(descriptor)
    started = Started(process, num_own_processes=2)
    if pause is not None:
        from rltrain.sandbox.relay import Relay  # slow to import, and other sandboxes do not need it

        ours, theirs = socket.socketpair()
        with ours, theirs:
            pause.listen(spec["host_port"], theirs)
            theirs.close()
            started.relay = Relay(ours, spec["host_port"])
    return started


def _in_namespaces(spec: dict[str, Any], contents: list[bytes], report: Report) -> Started:
    if spec["host_port"] is not None:
        from rltrain.sandbox.relay import Relay  # before the clone: the sandbox has no such file
    ours, theirs = socket.socketpair()
    process, own_users = _clone()
    uid = UID_INSIDE if own_users else NOBODY
    if process == 0:
        ours.close()
        be_first_process({**spec, "uid": uid, "own_user_namespace": own_users}, contents, theirs, report)
    theirs.close()
    started = Started(process, num_own_processes=1)
    started.to_first = ours
    started.is_counted_by_user = own_users and first_process.counts_processes_per_sandbox()
    if own_users:
        _map_users(process)
    ours.send(b"m")
    if spec["host_port"] is not None:
        started.relay = Relay(ours, spec["host_port"])
    return started


def _clone() -> tuple[int, bool]:
    """Returns (process, whether it has a new user namespace). The superuser needs none, and may be refused one."""
    try:
        return clone([*NEW_NAMESPACES]), True
    except OSError:
        if os.geteuid() != 0:
            raise
    return clone([name for name in NEW_NAMESPACES if name != "user"]), False


def _map_users(process: int) -> None:
    """Maps the program's user to nobody if this process may do so, else to this process's user.

    Linux does not limit the processes of the superuser, so another user is safer.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            for kind in ("uid_map", "gid_map"):
                _write(f"/proc/{process}/{kind}", f"0 0 1\n{UID_INSIDE} {NOBODY} 1")
            return
    _write(f"/proc/{process}/setgroups", "deny")
    _write(f"/proc/{process}/uid_map", f"{UID_INSIDE} {os.geteuid()} 1")
    _write(f"/proc/{process}/gid_map", f"{UID_INSIDE} {os.getegid()} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


COUNT_EVERY_S = 0.05
KILL_AGAIN_MS = 10
KILL_FOR_S = 30.0
"""Seconds to keep killing. After that, the rest are dying processes blocked by a disk or a device."""


class Keeper:
    """The keeper of one program, from its start to its end."""

    def __init__(self, spec: dict[str, Any], caller: socket.socket, started: Started) -> None:
        self.began = time.monotonic()
        self.limits = spec["limits"]
        self.parent = spec["caller"]
        self.caller = caller
        self.started = started
        self.statuses: dict[int, int] = {}
        """Wait status of every ended child."""
        self.children_ended, notified = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(notified)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll = select.poll()
        for watched in (caller.fileno(), self.children_ended):
            self.poll.register(watched, select.POLLIN)
        if started.relay is not None:
            started.relay.watch(self.poll)

    def keep(self) -> dict[str, Any]:
        """Waits until all processes of the program are gone. Returns the message about its end."""
        ended_by = self._watch()
        self._kill_all()
        seconds = time.monotonic() - self.began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        status = self.started.final_status(self.statuses)
        if ended_by is None and self._ended_by_cpu_limit(status, used.ru_utime + used.ru_stime):
            ended_by = "cpu"
        return {limits.ENDED: ended_by, "status": status, "seconds": seconds}

    def _ended_by_cpu_limit(self, status: int, cpu_s: float) -> bool:
        """Returns whether the kernel ended the program at its CPU limit per process. The kernel uses one of these
        signals."""
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return cpu_s >= self.limits["cpu_s"] and any(status in (-number, 128 + number) for number in signals)

    def _watch(self) -> str | None:
        """Waits for the end of the program. Returns None, or the reason why it must be ended."""
        end = self.began + self.limits["wall_s"]
        next_count = self.began + COUNT_EVERY_S
        while self._children_are_left() and self.started.process not in self.statuses:
            now = time.monotonic()
            if now >= end:
                return "time"
            if os.getppid() != self.parent:
                return "caller"
            if now >= next_count:
                if reason := self._limit_reached():
                    return reason
                next_count = time.monotonic() + COUNT_EVERY_S
            for descriptor, events in self.poll.poll(max(0.0, min(next_count, end) - time.monotonic()) * 1000):
                if descriptor == self.caller.fileno():
                    message = limits.receive(self.caller)
                    return "caller" if message is None else message["end"]
                if descriptor == self.children_ended:
                    os.read(self.children_ended, 4096)
                elif self.started.relay is not None:
                    self.started.relay.handle(descriptor, events)
        return None

    def _limit_reached(self) -> str | None:
        processes = descendants(os.getpid())
        used = usage(processes)
        if used.num_tasks > self.limits["num_processes"] + self.started.num_own_processes:
            return "processes"
        if used.cpu_s > self.limits["cpu_s"]:
            return "cpu"
        allowed = self.limits["memory_bytes"]
        # Resident bytes count shared memory several times.
        if used.resident_bytes > allowed and memory_bytes(processes) > allowed:
            return "memory"
        return None

    def _children_are_left(self) -> bool:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.statuses[ended[0]] = ended[1]
        except ChildProcessError:
            return False
        return True

    def _kill_all(self) -> None:
        """Kills all descendants of this process and waits until they are gone.

        The kernel kills all of a sandbox with its process 1. Without one, orphans become children of this process, and
        they can start more while others are killed. So it repeats.
        """
        deadline = time.monotonic() + KILL_FOR_S
        left = [self.started.process]
        while self._children_are_left() and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.poll.poll(KILL_AGAIN_MS)
            left = descendants(os.getpid())


def main(descriptor: int) -> None:
    """Reads the caller's request from its socket, runs the program, and reports its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the caller handles them
    os.umask(0o022)  # the program is another user and must read the folders
    os.set_inheritable(descriptor, False)
    caller = socket.socket(fileno=descriptor)
    spec = limits.receive(caller)
    if spec is None:
        return
    spec["channel"] = descriptor
    contents = []
    for _, size in spec["files"]:
        if (content := limits.receive_bytes(caller, size)) is None:
            return
        contents.append(content)

    def report(error: BaseException) -> None:
        limits.send(caller, {limits.ERROR: str(error) or repr(error)})

    process_control(PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(BrokenPipeError):  # the caller is gone, so the sandbox ends too
        process_limit = ProcessLimit(spec["limits"]["num_processes"] + MOST_OTHER_PROCESSES)
        try:
            with process_limit:
                started = start(spec, contents, report)
        except OSError as error:
            report(error)
            return
        _close_streams()
        uncounted = "" if started.is_counted_by_user else process_limit.lack
        limits.send(caller, {limits.STARTED: {"group": process_limit.folder, "uncounted": uncounted}})
        ended = Keeper(spec, caller, started).keep()
        started.remove_folder()
        process_limit.remove()
        limits.send(caller, ended)


def _close_streams() -> None:
    """Closes this process's copies of the program's streams, so that readers see their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
