"""What the system lets a job use: open files, locked memory, shared memory, disk."""

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rltrain.doctor.finding import FINE, LACKING, WRONG, Finding
from rltrain.runtime.machine import SHARED_MEMORY, free_bytes

FEWEST_FILES = 4096
"""A rank has a connection to every other rank of its groups, a file per checkpoint share, pipes of its workers."""
LEAST_SHARED_GB = 1.0
"""NCCL and SGLang's processes keep buffers there; containers have 0.06 by default."""
LEAST_DISK_GB = 1.0


def what_is_allowed(folders: list[Path]) -> Iterator[Finding]:
    """`folders` and the one for temporary files are asked how much they can take."""
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield room("shared memory", SHARED_MEMORY, LEAST_SHARED_GB, "; in a container: --ipc host or --shm-size")
    for folder in dict.fromkeys([*folders, Path(tempfile.gettempdir())]):
        yield room("disk", folder, LEAST_DISK_GB)


def open_files(soft: int, hard: int) -> Finding:
    if 0 <= soft < FEWEST_FILES:
        told = f"{soft} per process; expected {FEWEST_FILES} or more: ulimit -n (up to {hard} without more rights)"
        return Finding("open files", WRONG, told)
    return Finding("open files", FINE, "any number" if soft == resource.RLIM_INFINITY else f"{soft} per process")


def locked_memory(soft: int) -> Finding:
    """A network card reads and writes memory that is locked; without one nothing is."""
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", FINE, "any amount")
    told = f"{gigabytes(soft)} per process; InfiniBand and RoCE need ulimit -l unlimited"
    return Finding("locked memory", LACKING, told)


def room(what: str, folder: Path, least_gb: float, remedy: str = "") -> Finding:
    """How much can be written to `folder`."""
    what = f"{what}, {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(what, WRONG, f"read-only for this user, or not there{remedy}")
    free = free_bytes(folder)
    if free < least_gb * 1e9:
        return Finding(what, WRONG, f"{gigabytes(free)} free; expected {least_gb:g} GB or more{remedy}")
    return Finding(what, FINE, f"{gigabytes(free)} free")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
