"""Files of a node's memory for other nodes of the job, over TCP: the node that wants one asks for it.

A request is a line of JSON with the job's token and the file's name; the answer is the file's size in eight bytes, most
significant first, and its bytes. Where the request has a list of spans, these follow the size instead, each with its
checksum in four bytes. Nothing of it goes through the job's process groups, so threads may ask at any time.
"""

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rltrain.checkpoint.memory.spans import Span
from rltrain.checkpoint.run.files import READ_BYTES, FileRecord
from rltrain.errors import CheckpointError
from rltrain.reshard.native import crc32
from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import family_of

TIMEOUT_S = 60.0
"""Without a byte from the other side."""
SIZE_BYTES, CRC_BYTES = 8, 4
MAX_REQUEST_BYTES = 1 << 16
MAX_SPANS = 1000
"""In a request."""


class Address(NamedTuple):
    """Of a FileServer: what a client needs."""

    host: str
    port: int
    token: str


class FileServer:
    """Serves what lies below `root` to whoever knows the token, from threads of its own until it is closed."""

    def __init__(self, root: Path, host: str) -> None:
        self._root = root.resolve()
        self._listener = socket.create_server((host, 0), family=family_of(host))
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
                asked_for = self._asked_for(peer)
                if asked_for is None:
                    return
                path, spans = asked_for
                with path.open("rb", buffering=0) as file:
                    peer.sendall(path.stat().st_size.to_bytes(SIZE_BYTES, "big"))
                    if spans is None:
                        peer.sendfile(file)
                    else:
                        _send_spans(peer, file, spans)
            except OSError:  # the other side sees that the connection has ended, and says what it lacks
                return

    def _asked_for(self, peer: socket.socket) -> tuple[Path, list[Span] | None] | None:
        """The file and what of it, None for all; None where the peer may not have it."""
        with peer.makefile("rb") as lines:
            line = lines.readline(MAX_REQUEST_BYTES)
        try:
            request = json.loads(line)
            token, name = str(request["token"]), str(request["file"])
            spans = [Span(int(begin), int(end)) for begin, end in request["spans"]] if "spans" in request else None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if not hmac.compare_digest(token.encode(errors="replace"), self.address.token.encode()):
            return None
        path = (self._root / name).resolve()
        return (path, spans) if path.is_relative_to(self._root) and path.is_file() else None


def _send_spans(peer: socket.socket, file: FileIO, spans: Sequence[Span]) -> None:
    """OSError where the file is shorter."""
    block = memoryview(bytearray(READ_BYTES))
    for span in spans:
        crc, left = 0, span.end - span.begin
        file.seek(span.begin)
        while left > 0:
            count = file.readinto(block[: min(READ_BYTES, left)])
            if not count:
                raise OSError("the file ends before a span")
            peer.sendall(block[:count])
            crc, left = crc32(block[:count], crc), left - count
        peer.sendall(crc.to_bytes(CRC_BYTES, "big"))


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


def received(address: Address, name: str, num_bytes: int, spans: Sequence[Span]) -> Iterator[tuple[int, memoryview]]:
    """(where, bytes) of `spans` of the file `name`, which has `num_bytes`, piece by piece in memory that is used again.

    CheckpointError, perhaps after some pieces, which are then not to be used, where they do not come or have changed
    on their way.
    """
    block = memoryview(bytearray(READ_BYTES))
    for first in range(0, len(spans), MAX_SPANS):
        some = spans[first : first + MAX_SPANS]
        try:
            with _answer(address, {"file": name, "spans": some}) as (size_bytes, stream):
                if size_bytes != num_bytes:
                    raise OSError(f"it has {size_bytes} bytes there; expected {num_bytes}")
                for span in some:
                    crc, at = 0, span.begin
                    while at < span.end:
                        piece = block[: _read_some(stream, block[: min(READ_BYTES, span.end - at)])]
                        yield at, piece
                        crc, at = crc32(piece, crc), at + len(piece)
                    if int.from_bytes(_read_all(stream, CRC_BYTES), "big") != crc:
                        raise OSError(f"bytes {span.begin} to {span.end} have changed on their way")
        except OSError as error:
            raise CheckpointError(f"{name} from {address.host}: {error.strerror or error}") from error


def _receive(address: Address, name: str, path: Path, closing: threading.Event) -> FileRecord:
    num_bytes, crc, block = 0, 0, memoryview(bytearray(READ_BYTES))
    with _answer(address, {"file": name}) as (size_bytes, stream), path.open("wb") as file:
        while num_bytes < size_bytes and not closing.is_set():
            count = _read_some(stream, block[: min(READ_BYTES, size_bytes - num_bytes)])
            file.write(block[:count])
            num_bytes, crc = num_bytes + count, crc32(block[:count], crc)
    return FileRecord(num_bytes, crc)


@contextmanager
def _answer(address: Address, request: dict[str, Any]) -> Iterator[tuple[int, BinaryIO]]:
    """The file's size, and what follows. OSError."""
    with socket.create_connection((address.host, address.port), timeout=TIMEOUT_S) as peer:
        peer.sendall(json.dumps({"token": address.token, **request}).encode() + b"\n")
        with peer.makefile("rb") as stream:
            size = stream.read(SIZE_BYTES)
            if len(size) < SIZE_BYTES:
                raise OSError("it does not have it")
            yield int.from_bytes(size, "big"), stream


def _read_some(stream: BinaryIO, block: memoryview) -> int:
    count: int = stream.readinto1(block)  # type: ignore[attr-defined]
    if not count:
        raise OSError("the connection has ended before the file")
    return count


def _read_all(stream: BinaryIO, count: int) -> bytes:
    found = stream.read(count)
    if len(found) < count:
        raise OSError("the connection has ended before the file")
    return found
