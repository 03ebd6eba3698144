"""Host memory that processes of one user on one machine share: without a name in any file system.

It is reached through the open files of the process that made it, by its own user alone, and is gone with the last
process that has it open or mapped, however that ends. Unlike files in /dev/shm it is not bounded by that mount's size.
"""

import errno
import mmap
import os
from typing import Self

import torch
from torch import Tensor

NAME = "rltrain"
"""By which such memory is told from other open files."""
AVAILABLE = hasattr(os, "memfd_create")
"""Whether this system has such memory."""


class SharedMemory:
    """An open file without a name. `close` ends the access by `path`; memory that is mapped stays until it is freed."""

    def __init__(self, file: int) -> None:
        self.file = file

    @classmethod
    def create(cls) -> Self:
        """Without any bytes yet."""
        file = os.memfd_create(NAME)
        os.fchmod(file, 0o600)
        return cls(file)

    @classmethod
    def open(cls, process: int, file: int) -> Self:
        """What `process` has open under number `file`.

        Raises OSError where that cannot be reached from here, and where it is something else: to another container
        the same number may be another process.
        """
        path = path_of(process, file)
        found = os.readlink(path)
        if not found.startswith(f"/memfd:{NAME} "):
            raise OSError(errno.EINVAL, f"{found}; expected memory that rltrain shares", path)
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of this user find it for as long as it is open here."""
        return path_of(os.getpid(), self.file)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.file).st_size

    def resize(self, num_bytes: int) -> None:
        """Pages are taken from the machine when they are first written."""
        os.ftruncate(self.file, num_bytes)

    def map(self) -> Tensor:
        """uint8, all of it."""
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.file, self.num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self.file)


def path_of(process: int, file: int) -> str:
    return f"/proc/{process}/fd/{file}"
