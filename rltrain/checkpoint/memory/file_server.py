"""Files of a node's memory for other nodes of the job, over TCP: the node that wants one asks for it.

A request is a line of JSON with the job's token and the file's name; the answer is the file's size in eight bytes, most
significant first, and its bytes. Nothing of it goes through the job's process groups, so threads may ask at any time.
"""

import hmac
import json
import secrets
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rltrain.checkpoint.run.files import READ_BYTES, FileRecord
from rltrain.reshard.kernels.crc32 import crc32
from rltrain.system.threads import JobThread

TIMEOUT_S = 60.0
"""Without a byte from the other side."""
SIZE_BYTES = 8
MAX_REQUEST_BYTES = 1 << 16


class Address(NamedTuple):
    """Of a FileServer: what a client needs."""

    host: str
    port: int
    token: str


class FileServer:
    """Serves what lies below `root` to whoever knows the token, from threads of its own until it is closed."""

    def __init__(self, root: Path, host: str) -> None:
        self._root = root.resolve()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = Address(host, int(self._listener.getsockname()[1]), secrets.token_hex(16))
        JobThread(target=self._accept, name="memory checkpoint server", daemon=True).start()

    def close(self) -> None:
        """Take no more requests; those under way are answered."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        finally:
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            JobThread(target=self._serve, args=(peer,), name="memory checkpoint request", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.settimeout(TIMEOUT_S)
                path = self._asked_for(peer)
                if path is None:
                    return
                with path.open("rb") as file:
                    peer.sendall(path.stat().st_size.to_bytes(SIZE_BYTES, "big"))
                    peer.sendfile(file)
            except OSError:  # the other side sees that the connection has ended, and says what it lacks
                return

    def _asked_for(self, peer: socket.socket) -> Path | None:
        """The file; None where the peer may not have it."""
        with peer.makefile("rb") as lines:
            line = lines.readline(MAX_REQUEST_BYTES)
        try:
            request = json.loads(line)
            token, name = str(request["token"]), str(request["file"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not hmac.compare_digest(token.encode(errors="replace"), self.address.token.encode()):
            return None
        path = (self._root / name).resolve()
        return path if path.is_relative_to(self._root) and path.is_file() else None


def fetch(address: Address, name: str, path: Path, expected: FileRecord, closing: threading.Event) -> str | None:
    """Copy the file `name` of a server to `path`, in pieces of READ_BYTES. What went wrong, in words, or None: there is
    no file at `path` then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _receive(address, name, path, closing)
    except OSError as error:
        with suppress(OSError):  # its folder may be what there is no room for
            path.unlink()
        return f"{name} from {address.host}: {error.strerror or error}"
    if found != expected:
        path.unlink(missing_ok=True)
        got = f"{found.num_bytes} bytes with checksum {found.crc32:08x}"
        return f"{name} from {address.host}: got {got}; expected {expected.num_bytes}, {expected.crc32:08x}"
    return None


def _receive(address: Address, name: str, path: Path, closing: threading.Event) -> FileRecord:
    num_bytes, crc, block = 0, 0, memoryview(bytearray(READ_BYTES))
    with socket.create_connection((address.host, address.port), timeout=TIMEOUT_S) as peer, path.open("wb") as file:
        peer.sendall(json.dumps({"token": address.token, "file": name}).encode() + b"\n")
        with peer.makefile("rb", buffering=0) as stream:
            size = stream.read(SIZE_BYTES)
            if not size or len(size) < SIZE_BYTES:
                raise OSError("it does not have it")
            size_bytes = int.from_bytes(size, "big")
            while num_bytes < size_bytes and not closing.is_set():
                count = stream.readinto(block[: min(READ_BYTES, size_bytes - num_bytes)])
                if not count:
                    raise OSError(f"the connection ended after {num_bytes} of {size_bytes} bytes")
                file.write(block[:count])
                num_bytes, crc = num_bytes + count, crc32(block[:count], crc)
    return FileRecord(num_bytes, crc)
