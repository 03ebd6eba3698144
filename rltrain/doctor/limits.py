"""What the system lets a job use: open files, locked memory, shared memory, disk."""

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rltrain.doctor.finding import FINE, LACKING, WRONG, Finding

FEWEST_FILES = 4096
"""A rank has a connection to every other rank of its groups, a file per checkpoint share, pipes of its workers."""
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GB = 1.0
"""NCCL and SGLang's processes keep buffers there; containers have 0.06 by default."""
LEAST_DISK_GB = 1.0


def what_is_allowed(folders: list[Path]) -> Iterator[Finding]:
    """`folders` and the one for temporary files are asked how much they can take."""
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield shared_memory(SHARED_MEMORY)
    for folder in dict.fromkeys([*folders, Path(tempfile.gettempdir())]):
        yield free_disk(folder)


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


def shared_memory(folder: Path) -> Finding:
    what = f"shared memory, {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(what, WRONG, "not there, or not to be written")
    free = free_bytes(folder)
    if free < LEAST_SHARED_GB * 1e9:
        told = (
            f"{gigabytes(free)} free; expected {LEAST_SHARED_GB:g} GB or more: in a container --ipc host or --shm-size"
        )
        return Finding(what, WRONG, told)
    return Finding(what, FINE, f"{gigabytes(free)} free")


def free_disk(folder: Path) -> Finding:
    what = f"disk, {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(what, WRONG, "read-only for this user, or not there")
    free = free_bytes(folder)
    if free < LEAST_DISK_GB * 1e9:
        return Finding(what, WRONG, f"{gigabytes(free)} free; expected {LEAST_DISK_GB:g} GB or more")
    return Finding(what, FINE, f"{gigabytes(free)} free")


def free_bytes(folder: Path) -> int:
    """Which this user may fill."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
