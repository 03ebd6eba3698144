"""What a program may use, what it is given, and how its caller and its keeper talk."""

import json
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a program may use, and how its run ended.

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Of one program with all that it starts, unless said otherwise. Whoever reaches one is ended, or is refused what
    goes beyond it."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Seconds of processors."""
    memory_bytes: int = 512 * MIB
    """What is written to its files counts as well where these are kept in memory, up to `written_bytes` more."""
    num_processes: int = 64
    """Threads are counted too."""
    file_bytes: int = 64 * MIB
    """Of one file."""
    written_bytes: int = 128 * MIB
    """Of all its files."""
    num_files: int = 8192
    num_open_files: int = 256
    """Of each process."""
    output_bytes: int = MIB
    """Of standard output, and of standard error."""

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if not 0 < value < math.inf}
        if wrong:
            raise ValueError(f"limits {wrong}; expected numbers above 0")


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Nothing of it is left then."""

    status: int
    """Exit status, or the negative number of the signal that ended it."""
    stdout: bytes
    stderr: bytes
    ended_by: str | None
    """None: it ended by itself. "time", "cpu", "memory", "processes", "output": it reached this limit. "caller": it was
    closed. "lost": its keeper was killed."""
    seconds: float
    stdout_truncated: bool = False
    """Whether there was more than limits.output_bytes."""
    stderr_truncated: bool = False

    @property
    def succeeded(self) -> bool:
        """By its own account: it may have printed anything."""
        return self.status == 0 and self.ended_by is None


# What the caller of a sandbox and its keeper say to each other, over a socket.

STARTED = "started"
"""Key of the keeper's first message: the sandbox is made and its program begins. Below it, the folder of the control
group that limits its processes, or null, and why the kernel does not limit their number, or "". Then one of these two:
"""
ERROR = "error"
"""Key: why it cannot be made, or why its program cannot begin."""
ENDED = "ended"
"""Key: how the program ended; nothing of it is left."""
LENGTH = struct.Struct("=I")


def send(channel: socket.socket, message: dict[str, Any], contents: Sequence[bytes] = ()) -> None:
    """One message, and the contents of files behind it."""
    packed = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(packed)) + packed)
    for content in contents:
        channel.sendall(content)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """None: the other side is gone."""
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


# The files that a program is given.


def checked_name(name: str) -> str:
    """A name as it will be in the program's folder. Raises ValueError for one that leads out of it."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise ValueError(
            f"the file name {name!r} cannot be used: expected a path within the program's folder, as a/b.py"
        )
    return name


def in_order(files: Mapping[str, bytes]) -> tuple[list[tuple[str, int]], list[bytes]]:
    """(names and sizes, contents)."""
    return [(checked_name(name), len(content)) for name, content in files.items()], list(files.values())


def write_files(folder: str, files: list[tuple[str, int]], contents: list[bytes]) -> None:
    for (name, _), content in zip(files, contents, strict=True):
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
