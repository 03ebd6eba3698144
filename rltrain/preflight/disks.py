"""What keeps this node from writing: read-only or full file systems, no shared memory."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

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
