"""Limits and results of programs, and the messages between a caller and its keeper."""

import json
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Limits and results.

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """The limits of a program together with all processes that it starts, unless noted otherwise. At a limit, processes
    are ended or an operation fails."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """CPU seconds."""
    memory_bytes: int = 512 * MIB
    """Bytes of memory. Files in memory count too, and can use up to `written_bytes` more."""
    num_processes: int = 64
    """Number of processes and threads."""
    file_bytes: int = 64 * MIB
    """Bytes per file."""
    written_bytes: int = 128 * MIB
    """Bytes of all files."""
    num_files: int = 8192
    num_open_files: int = 256
    """Open files per process."""
    output_bytes: int = MIB
    """Bytes of standard output, and of standard error."""

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if not 0 < value < math.inf}
        if wrong:
            raise ValueError(f"limits {wrong}; expected numbers above 0")


@dataclass(frozen=True)
class Outcome:
    """The result of a program. All its processes are gone."""

    status: int
    """Exit status, or the negative number of the signal that ended it."""
    stdout: bytes
    stderr: bytes
    ended_by: str | None
    """None if it ended by itself. "time", "cpu", "memory", "processes" and "output" name the reached limit. "caller"
    means closed by the caller. "lost" means that its keeper was killed."""
    seconds: float
    stdout_truncated: bool = False
    """True if there was more output than limits.output_bytes."""
    stderr_truncated: bool = False

    @property
    def succeeded(self) -> bool:
        """True if the exit status is 0 and no limit was reached. The program itself chooses its status and output."""
        return self.status == 0 and self.ended_by is None


# Messages between the caller of a sandbox and its keeper, over a socket.

STARTED = "started"
"""Key of the keeper's first message: the program has started. Its value has the folder of the control group that limits
its processes (or null), and the reason why the kernel does not limit their number (or ""). One of the next two messages
follows."""
ERROR = "error"
"""Key of the reason why the sandbox or its program could not start."""
ENDED = "ended"
"""Key of the program's end. All its processes are gone."""
LENGTH = struct.Struct("=I")


def send(channel: socket.socket, message: dict[str, Any], contents: Sequence[bytes] = ()) -> None:
    """Sends one message, followed by the contents of files."""
    packed = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(packed)) + packed)
    for content in contents:
        channel.sendall(content)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Returns one message, or None if the other side is gone."""
    header = receive_bytes(channel, LENGTH.size)
    if header is None:
        return None
    packed = receive_bytes(channel, LENGTH.unpack(header)[0])
    message: dict[str, Any] | None = None if packed is None else json.loads(packed)
    return message


def receive_bytes(channel: socket.socket, length: int) -> bytes | None:
    parts: list[bytes] = []
    while length:
        try:
            part = channel.recv(min(length, 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# Files for a program.


def checked_name(name: str) -> str:
    """Returns the name, a path within the program's folder. Raises ValueError if it leads out of the folder."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise ValueError(
            f"the file name {name!r} is not allowed; expected a path within the program's folder, such as a/b.py"
        )
    return name


def in_order(files: Mapping[str, bytes]) -> tuple[list[tuple[str, int]], list[bytes]]:
    """Returns (names and sizes, contents)."""
    return [(checked_name(name), len(content)) for name, content in files.items()], list(files.values())


def write_files(folder: str, files: list[tuple[str, int]], contents: list[bytes]) -> None:
    for (name, _), content in zip(files, contents, strict=True):
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
