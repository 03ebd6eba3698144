"""Process 1 of a sandbox. It makes the sandbox from within, starts the program, and reaps all orphans.

It starts in new namespaces with all capabilities over them. It gives them up before the program begins. When it ends,
the kernel kills every process of the sandbox.
"""

import math
import os
import re
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from rltrain.sandbox import root_file_system, system_calls
from rltrain.sandbox.limits import write_files
from rltrain.sandbox.system_calls import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    drop_bounding_capabilities,
    drop_capabilities,
    process_control,
    set_hostname,
)

# The start of the program, with its files and limits and without the state of this process.

DESCRIPTORS_TO_CLOSE = 65536
CPU_GRACE_S = 1
"""Seconds by which the kernel's limit exceeds the keeper's. Also the seconds between the kernel's warning and its
kill."""


def start(spec: dict[str, Any], streams: tuple[int, int, int], folder: str, report: Any) -> int:
    """Returns the process id of the program. It has its own session and ends with this process. If the program cannot
    start, its process calls `report(error)`."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # the parent may have ended before the line above
            _become(spec, streams, folder)
    except BaseException as error:
        report(error)
    os._exit(127)


def _become(spec: dict[str, Any], streams: tuple[int, int, int], folder: str) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    limit(spec["limits"])
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:  # execve resets handlers, but not ignored signals
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    kept = sorted([*spec.get("descriptors", []), spec["channel"]])  # execve closes the channel, the last one
    for begin, end in zip([3, *(fd + 1 for fd in kept)], [*kept, DESCRIPTORS_TO_CLOSE], strict=True):
        os.closerange(begin, end)
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def limit(limits: dict[str, Any]) -> None:
    """Sets the limits per process, enforced by the kernel. The keeper enforces those of all processes together."""
    cpu_s = math.ceil(limits["cpu_s"]) + CPU_GRACE_S
    wanted = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + CPU_GRACE_S),
        resource.RLIMIT_DATA: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["num_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in wanted.items():
        _set_limit(which, *(value if isinstance(value, tuple) else (value, value)))


def _set_limit(which: int, soft: int, hard: int) -> None:
    """Sets a limit, but not above the limit of this process."""
    allowed = resource.getrlimit(which)[1]
    if allowed != resource.RLIM_INFINITY:
        soft, hard = min(soft, allowed), min(hard, allowed)
    resource.setrlimit(which, (soft, hard))


def counts_processes_per_sandbox() -> bool:
    """Returns whether Linux limits processes per user namespace, as it does since 5.14."""
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 14)


def limit_number_of_processes(number: int) -> None:
    """Limits the processes and threads of this user in this user namespace."""
    if counts_processes_per_sandbox():
        _set_limit(resource.RLIMIT_NPROC, number, number)


def send_status(descriptor: int, wait_status: int) -> None:
    os.write(descriptor, struct.pack("=i", wait_status))


def receive_status(descriptor: int) -> int | None:
    """Returns the wait status, or None if the first process was killed."""
    packed = os.read(descriptor, 4)
    return struct.unpack("=i", packed)[0] if len(packed) == 4 else None


Report = Callable[[BaseException], None]


def be_first_process(spec: dict[str, Any], contents: list[bytes], keeper: socket.socket, report: Report) -> NoReturn:
    """Runs process 1. `keeper` is a socket to the keeper outside.

    The keeper sends a byte once this process's user is mapped. It receives the listening socket if the program may
    reach a port. At the end it receives the program's wait status.
    """
    try:
        if keeper.recv(1):
            _make_sandbox(spec, keeper)
            write_files(root_file_system.WORK_FOLDER, spec["files"], contents)
            started = start(spec, (0, 1, 2), root_file_system.WORK_FOLDER, report)
            send_status(keeper.fileno(), _reap_until(started))
    except BaseException as error:
        report(error)
    os._exit(0)


def _make_sandbox(spec: dict[str, Any], keeper: socket.socket) -> None:
    limits, uid = spec["limits"], spec["uid"]
    set_hostname("sandbox")
    root_file_system.make_root(spec["visible"], limits["written_bytes"], limits["num_files"], uid)
    listening = spec["host_port"] is not None
    if listening:
        from rltrain.sandbox.relay import hand_over_listener, start_loopback  # already imported by the keeper

        start_loopback()
        hand_over_listener(spec["host_port"], keeper)
    _become_user(uid)
    if spec["own_user_namespace"]:
        limit_number_of_processes(limits["num_processes"] + 1)  # including this process
    process_control(PR_SET_NO_NEW_PRIVS, 1)
    system_calls.restrict_this_process(internet_sockets=listening)
    process_control(PR_SET_DUMPABLE, 0)
    process_control(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, because that resets it
    if any(events & select.POLLHUP for _, events in _poll(keeper)):
        os._exit(0)


def _poll(keeper: socket.socket) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(keeper, select.POLLIN)
    return poll.poll(0)


def _become_user(uid: int) -> None:
    drop_bounding_capabilities()
    if os.getuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    drop_capabilities()


def _reap_until(started: int) -> int:
    """Reaps processes until the program ends, and returns its wait status."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):  # only the program keeps the streams, so readers see its end
        os.dup2(nothing, stream)
    while True:
        pid, status = os.wait()
        if pid == started:
            return status
