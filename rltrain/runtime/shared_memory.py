"""Host memory shared by processes of one user on one machine, without a name in any file system.

Other processes of the user reach it through the open files of its creator. It disappears with the last process that has
it open or mapped, even after a crash. Unlike files in /dev/shm, it is not limited by the size of that mount.
"""

import errno
import mmap
import os
from typing import Self

import torch
from torch import Tensor

NAME = "rltrain"
"""The name of this memory among open files."""
AVAILABLE = hasattr(os, "memfd_create")
"""Whether this system supports such memory."""


class SharedMemory:
    """An open file without a name. `close` ends the access by `path`. Mapped memory stays until it is freed."""

    def __init__(self, file: int) -> None:
        self.file = file

    @classmethod
    def create(cls) -> Self:
        """Creates memory of zero bytes."""
        file = os.memfd_create(NAME)
        os.fchmod(file, 0o600)
        return cls(file)

    @classmethod
    def open(cls, process: int, file: int) -> Self:
        """Opens file number `file` of `process`.

        Raises OSError if it cannot be reached, or if it is something else. In another container the same number may
        belong to another process.
        """
        path = path_of(process, file)
        found = os.readlink(path)
        if not found.startswith(f"/memfd:{NAME} "):
            raise OSError(errno.EINVAL, f"{found}; expected memory that rltrain shares", path)
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """The path for other processes of this user. Valid while the file is open here."""
        return path_of(os.getpid(), self.file)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.file).st_size

    def resize(self, num_bytes: int) -> None:
        """Sets the size. The machine supplies pages at the first write."""
        os.ftruncate(self.file, num_bytes)

    def map(self) -> Tensor:
        """Maps all bytes. Returns a tensor of dtype uint8."""
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.file, self.num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self.file)


def path_of(process: int, file: int) -> str:
    return f"/proc/{process}/fd/{file}"
