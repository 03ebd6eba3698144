"""A file of a checkpoint in memory that this node lacks: what its ranks read of it comes from another node."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rltrain.checkpoint.memory.file_server import Address, received
from rltrain.checkpoint.memory.spans import Span, merged, spans_of, without
from rltrain.checkpoint.run.saved_file import Rows, SavedFile
from rltrain.checkpoint.safetensors_file import LENGTH_BYTES, TYPE_NAMES
from rltrain.errors import CheckpointError

SUFFIX = ".fetched"
"""Of what a node's ranks share of such a file, with holes, and with one more of the list of what there is."""
SPANS_SUFFIX = ".spans"
HEAD_BYTES = 1 << 16
"""Asked for first: the header is in them, or most of it."""
GAP_BYTES = 1 << 16
"""What lies between two spans that are as near is asked for with them."""
LOOK_S = 0.01
"""Between two looks whether another rank of the node is done with the file."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ITEM_BYTES = {name: dtype.itemsize for dtype, name in TYPE_NAMES.items()}


class Source(NamedTuple):
    """Where the file is: `name` there is relative to what the server serves, and `num_bytes` the manifest's.

    The node has compared the file's checksum as the job began, and what travels has one of its own.
    """

    address: Address
    name: str
    num_bytes: int
    advance: Callable[[], None]
    """Called with every piece, and while another rank's fetch is waited for."""


class FetchedFile(SavedFile):
    """What any rank of the node has asked for is in `path` with SUFFIX, which all of them share, and is fetched once.
    Where the folder has no room for it the rank keeps what it asks for in memory of its own, as long as the object
    lives.

    Every call waits for the other node, no longer than file_server.TIMEOUT_S without a byte; CheckpointError with the
    file and the node where it fails.
    """

    is_whole = False

    def __init__(self, path: Path, source: Source) -> None:
        super().__init__(path)
        self.source = source
        self.shared = path.with_name(path.name + SUFFIX)
        self._spans = path.with_name(path.name + SUFFIX + SPANS_SUFFIX)
        self._own: _OwnMemory | None = None

    @property
    def place(self) -> Path:
        return self._own.path if self._own else self.shared

    def begin(self) -> None:
        """Ask for the header, before anything else. CheckpointError where the folder has no room even for that."""
        try:
            self._fetch_shared([Span(0, HEAD_BYTES)])
            self._fetch_shared([Span(0, self._header_end)])
        except OSError as error:
            raise self._unwritten(error) from error

    def ask_for_tensor(self, name: str) -> None:
        begin, end, _ = self._place_of(name, self._header())
        self._ask_for([Span(begin, end)])

    def ask_for_rows(self, rows: Sequence[Rows]) -> None:
        header, found = self._header(), list[Span]()
        for one in rows:
            begin, _, item_bytes = self._place_of(one.tensor, header)
            found += spans_of(one, begin, item_bytes, GAP_BYTES)
        self._ask_for(found)

    def ask_for_all(self) -> None:
        self._ask_for([Span(0, self.source.num_bytes)])

    def _ask_for(self, spans: Sequence[Span]) -> None:
        wanted = merged(spans, GAP_BYTES)
        if self._own is None:
            try:
                self._fetch_shared(wanted)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise self._unwritten(error) from error
                self._own = _OwnMemory(self.source.num_bytes)
        if self._own is not None:
            wanted = without(merged([Span(0, self._header_end), *wanted]), self._own.there)
            self._fetch(wanted, self._own.descriptor)
            self._own.there = merged([*self._own.there, *wanted])

    def _fetch_shared(self, wanted: Sequence[Span]) -> None:
        """What no rank of the node has asked for yet. OSError where it cannot be written."""
        descriptor = os.open(self.shared, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, self.source.num_bytes)
            there = spans_there(self._spans)
            if lacking := without(self._clipped(wanted), there):
                self._fetch(lacking, descriptor)
                self._spans.write_text(json.dumps(merged([*there, *lacking])))
        finally:
            os.close(descriptor)  # and its lock is free

    def _lock(self, descriptor: int) -> None:
        """Whoever has it holds it no longer than a fetch of its own takes, which has a limit."""
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.source.advance()
                time.sleep(LOOK_S)
            else:
                return

    def _fetch(self, spans: Sequence[Span], descriptor: int) -> None:
        address, name, num_bytes, advance = self.source
        for offset, block in received(address, name, num_bytes, spans):
            _write(descriptor, block, offset)
            advance()

    def _clipped(self, spans: Sequence[Span]) -> list[Span]:
        return [Span(begin, min(end, self.source.num_bytes)) for begin, end in spans]

    @cached_property
    def _header_end(self) -> int:
        """Where the tensors' bytes begin."""
        with self.place.open("rb") as file:
            return LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")

    def _header(self) -> Mapping[str, Any]:
        """Not kept: those of a large model's files are large together."""
        with self.place.open("rb") as file:
            found: dict[str, Any] = json.loads(file.read(self._header_end)[LENGTH_BYTES:])
        return found

    def _place_of(self, name: str, header: Mapping[str, Any]) -> tuple[int, int, int]:
        """(a tensor's first byte, the one behind its last, bytes of an element)."""
        if name not in header:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        begin, end = header[name]["data_offsets"]
        return self._header_end + begin, self._header_end + end, ITEM_BYTES[header[name]["dtype"]]

    def _unwritten(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoint.memory.folder: cannot write {self.shared}: {error.strerror or error}")


class _OwnMemory:
    """A file of this process alone, in no folder: none limits it, and it goes with the object."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        self.path = Path(f"/proc/self/fd/{self.descriptor}")
        self.there: list[Span] = []

    def __del__(self) -> None:
        os.close(self.descriptor)


def spans_there(path: Path) -> list[Span]:
    """What the list at `path` says. Nothing where there is none, or half of one that a killed rank has left."""
    try:
        return [Span(*span) for span in json.loads(path.read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, offset)
        block, offset = block[count:], offset + count
