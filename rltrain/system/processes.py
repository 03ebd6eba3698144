"""Whether a process of this machine still runs, by a name that tells it from those of other machines."""

import os
import platform
from functools import cache
from pathlib import Path


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
