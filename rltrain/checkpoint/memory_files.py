"""Serves files of a node's memory to other nodes, and fetches missing ranges of them."""

import errno
import fcntl
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from isal.isal_zlib import crc32

from rltrain.checkpoint.run_files import READ_BYTES, FileRecord, SavedFile, TensorRows
from rltrain.checkpoint.safetensors_file import LENGTH_BYTES, TYPE_NAMES
from rltrain.errors import CheckpointError
from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import family_of

# Ranges [begin, end) of a file's bytes, and the choice of ranges to fetch.


class ByteSpan(NamedTuple):
    begin: int
    end: int


def merged(spans: Iterable[ByteSpan], gap: int = 0) -> list[ByteSpan]:
    """Returns the spans sorted and without overlaps. Spans with at most `gap` bytes between them are joined."""
    found: list[ByteSpan] = []
    for span in sorted(span for span in spans if span.begin < span.end):
        if found and span.begin <= found[-1].end + gap:
            found[-1] = ByteSpan(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def without(spans: Iterable[ByteSpan], there: Iterable[ByteSpan]) -> list[ByteSpan]:
    """Returns the parts of `spans` outside `there`. Both must be results of `merged`."""
    found, held = [], [*there]
    for begin, end in spans:
        for other in held:
            if other.end <= begin or end <= other.begin:
                continue
            found.append(ByteSpan(begin, other.begin))
            begin = other.end
        found.append(ByteSpan(begin, end))
    return [span for span in found if span.begin < span.end]


def spans_of(rows: TensorRows, begin: int, item_bytes: int, gap: int) -> Iterator[ByteSpan]:
    """Yields the spans of elements of a tensor with its bytes from `begin` on. Rows at most `gap` bytes apart are one
    span."""
    first, row_bytes, stride_bytes = begin + rows.first * item_bytes, rows.cols * item_bytes, rows.stride * item_bytes
    if rows.rows and stride_bytes - row_bytes <= gap:
        yield ByteSpan(first, first + (rows.rows - 1) * stride_bytes + row_bytes)
        return
    for row in range(rows.rows):
        yield ByteSpan(first + row * stride_bytes, first + row * stride_bytes + row_bytes)


# Files of a node's memory for other nodes of the job, over TCP. The node in need of a file asks for it.
#
# A request is a line of JSON with the job's token and the file's name. The answer is the file's size in eight bytes,
# most significant first, and its bytes. If the request has a list of spans, these follow the size instead, each with
# its checksum in four bytes. The job's process groups are not used, so threads may ask at any time.

TIMEOUT_S = 60.0
"""Seconds without a byte from the other side."""
SIZE_BYTES, CRC_BYTES = 8, 4
MAX_REQUEST_BYTES = 1 << 16
MAX_SPANS = 1000
"""Spans per request."""


class Address(NamedTuple):
    """The address of a FileServer for its clients."""

    host: str
    port: int
    token: str


class FileServer:
    """A server of the files below `root` for clients with the token. It runs in separate threads until it is closed."""

    def __init__(self, root: Path, host: str) -> None:
        self._root = root.resolve()
        self._listener = socket.create_server((host, 0), family=family_of(host))
        self.address = Address(host, int(self._listener.getsockname()[1]), secrets.token_hex(16))
        JobThread(target=self._accept, name="memory checkpoint server", daemon=True).start()

    def close(self) -> None:
        """Refuses further requests. Requests under way are still answered."""
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
            except OSError:  # the other side sees the end of the connection and reports what is missing
                return

    def _asked_for(self, peer: socket.socket) -> tuple[Path, list[ByteSpan] | None] | None:
        """Returns the requested file and its spans, or None for the spans if all of it is requested. Returns None if
        the peer may not have it."""
        with peer.makefile("rb") as lines:
            line = lines.readline(MAX_REQUEST_BYTES)
        try:
            request = json.loads(line)
            token, name = str(request["token"]), str(request["file"])
            spans = [ByteSpan(int(begin), int(end)) for begin, end in request["spans"]] if "spans" in request else None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if not hmac.compare_digest(token.encode(errors="replace"), self.address.token.encode()):
            return None
        path = (self._root / name).resolve()
        return (path, spans) if path.is_relative_to(self._root) and path.is_file() else None


def _send_spans(peer: socket.socket, file: FileIO, spans: Sequence[ByteSpan]) -> None:
    """Sends spans with their checksums. Raises OSError if the file is shorter."""
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
    """Copies the file `name` of a server to `path`, in pieces of READ_BYTES. Returns None, or a description of the
    failure. After a failure there is no file at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _receive(address, name, path, closing)
    except OSError as error:
        with suppress(OSError):  # there may be no room even for its folder
            path.unlink()
        return f"{name} from {address.host}: {error.strerror or error}"
    if found != expected:
        path.unlink(missing_ok=True)
        got = f"{found.num_bytes} bytes with checksum {found.crc32:08x}"
        return f"{name} from {address.host}: got {got}; expected {expected.num_bytes}, {expected.crc32:08x}"
    return None


def received(
    address: Address, name: str, num_bytes: int, spans: Sequence[ByteSpan]
) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, bytes) of `spans` of the file `name` with `num_bytes`, piece by piece. All pieces are in the same
    memory.

    Raises CheckpointError if pieces do not arrive or have changed on their way. Earlier pieces must then not be used.
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
    """Yields the file's size and the stream of its contents. Raises OSError if the server does not have it."""
    with socket.create_connection((address.host, address.port), timeout=TIMEOUT_S) as peer:
        peer.sendall(json.dumps({"token": address.token, **request}).encode() + b"\n")
        with peer.makefile("rb") as stream:
            size = stream.read(SIZE_BYTES)
            if len(size) < SIZE_BYTES:
                raise OSError("the server does not have it")
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


# A file of a checkpoint in another node's memory. This node fetches only the parts read by its ranks.

SUFFIX = ".fetched"
"""The end of the name of the node's shared copy of such a file, with holes. SPANS_SUFFIX names the list of its
spans."""
SPANS_SUFFIX = ".spans"
HEAD_BYTES = 1 << 16
"""Bytes asked for first. They have the header, or most of it."""
GAP_BYTES = 1 << 16
"""Spans at most this many bytes apart are asked for together."""
LOOK_S = 0.01
"""Seconds between two attempts to lock a file used by another rank of the node."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ITEM_BYTES = {name: dtype.itemsize for dtype, name in TYPE_NAMES.items()}


class FileSource(NamedTuple):
    """The source of a file. `name` is relative to the root of the server. `num_bytes` is from the manifest.

    The other node has compared the file's checksum at the start of the job. Each transfer has its own checksum.
    """

    address: Address
    name: str
    num_bytes: int
    advance: Callable[[], None]
    """Called after every piece, and while another rank's fetch is awaited."""


class FetchedFile(SavedFile):
    """A file in another node's memory, read through a copy on this node.

    The copy is at `path` with SUFFIX and shared by all ranks of the node, so each part is fetched once. If the folder
    has no room for it, the rank keeps its parts in its own memory for as long as the object lives.

    Every call may wait for the other node, for up to TIMEOUT_S without a byte. Raises CheckpointError with the file and
    the node if this fails.
    """

    is_whole = False

    def __init__(self, path: Path, source: FileSource) -> None:
        super().__init__(path)
        self.source = source
        self.shared = path.with_name(path.name + SUFFIX)
        self._spans = path.with_name(path.name + SUFFIX + SPANS_SUFFIX)
        self._own: _OwnMemory | None = None

    @property
    def place(self) -> Path:
        return self._own.path if self._own else self.shared

    def begin(self) -> None:
        """Fetches the header. Call it before anything else. Raises CheckpointError if the folder has no room even for
        the header."""
        try:
            self._fetch_shared([ByteSpan(0, HEAD_BYTES)])
            self._fetch_shared([ByteSpan(0, self._header_end)])
        except OSError as error:
            raise self._unwritten(error) from error

    def ask_for_tensor(self, name: str) -> None:
        begin, end, _ = self._place_of(name, self._header())
        self._ask_for([ByteSpan(begin, end)])

    def ask_for_rows(self, rows: Sequence[TensorRows]) -> None:
        header, found = self._header(), list[ByteSpan]()
        for one in rows:
            begin, _, item_bytes = self._place_of(one.tensor, header)
            found += spans_of(one, begin, item_bytes, GAP_BYTES)
        self._ask_for(found)

    def ask_for_all(self) -> None:
        self._ask_for([ByteSpan(0, self.source.num_bytes)])

    def _ask_for(self, spans: Sequence[ByteSpan]) -> None:
        wanted = merged(spans, GAP_BYTES)
        if self._own is None:
            try:
                self._fetch_shared(wanted)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise self._unwritten(error) from error
                self._own = _OwnMemory(self.source.num_bytes)
        if self._own is not None:
            wanted = without(merged([ByteSpan(0, self._header_end), *wanted]), self._own.there)
            self._fetch(wanted, self._own.descriptor)
            self._own.there = merged([*self._own.there, *wanted])

    def _fetch_shared(self, wanted: Sequence[ByteSpan]) -> None:
        """Fetches the parts not yet fetched by any rank of the node. Raises OSError if they cannot be written."""
        descriptor = os.open(self.shared, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, self.source.num_bytes)
            there = spans_there(self._spans)
            if lacking := without([ByteSpan(begin, min(end, self.source.num_bytes)) for begin, end in wanted], there):
                self._fetch(lacking, descriptor)
                self._spans.write_text(json.dumps(merged([*there, *lacking])))
        finally:
            os.close(descriptor)  # this also releases its lock

    def _lock(self, descriptor: int) -> None:
        """Waits for the lock. A rank holds it only during a fetch, and a fetch has a timeout."""
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.source.advance()
                time.sleep(LOOK_S)
            else:
                return

    def _fetch(self, spans: Sequence[ByteSpan], descriptor: int) -> None:
        address, name, num_bytes, advance = self.source
        for offset, block in received(address, name, num_bytes, spans):
            _write(descriptor, block, offset)
            advance()

    @cached_property
    def _header_end(self) -> int:
        """The position of the tensors' bytes in the file."""
        with self.place.open("rb") as file:
            return LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")

    def _header(self) -> Mapping[str, Any]:
        """Returns the header. It is not kept, because the headers of a large model's files take much memory
        together."""
        with self.place.open("rb") as file:
            found: dict[str, Any] = json.loads(file.read(self._header_end)[LENGTH_BYTES:])
        return found

    def _place_of(self, name: str, header: Mapping[str, Any]) -> tuple[int, int, int]:
        """Returns (a tensor's first byte, its end, bytes of an element)."""
        if name not in header:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        begin, end = header[name]["data_offsets"]
        return self._header_end + begin, self._header_end + end, ITEM_BYTES[header[name]["dtype"]]

    def _unwritten(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoint.memory.folder: cannot write {self.shared}: {error.strerror or error}")


class _OwnMemory:
    """An anonymous file of this process. No folder limits its size, and it disappears with the object."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        self.path = Path(f"/proc/self/fd/{self.descriptor}")
        self.there: list[ByteSpan] = []

    def __del__(self) -> None:
        os.close(self.descriptor)


def spans_there(path: Path) -> list[ByteSpan]:
    """Returns the spans in the list at `path`. Returns none if it is missing, or incomplete because a rank was
    killed."""
    try:
        return [ByteSpan(*span) for span in json.loads(path.read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, offset)
        block, offset = block[count:], offset + count
