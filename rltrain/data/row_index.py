"""A file that says where the usable rows of a source stand, so that they need not be held: records and a summary."""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rltrain.data.row_checks import DroppedRows

MAGIC = b"RLTRROWS"
FORMAT = 1
"""Part of an index's name: one of another format is not looked at."""
RECORD = np.dtype([("place", "<i8"), ("number", "<i8")])
SORTED_RECORD = np.dtype([*RECORD.descr, ("difficulty", "<f8")])
"""Where a curriculum sorts by it."""
BUFFERED_ROWS = 2**14
Records = npt.NDArray[np.void]


class DamagedIndexError(Exception):
    """Why a file is no index that can be used."""


@dataclass(frozen=True)
class IndexedFile:
    """`num_rows` rows of a file, which was so large and so old when they were checked."""

    path: str
    prefix: str
    """What the origin of its rows begins with."""
    reads: Literal["lines", "parquet", "arrow"]
    """How the row is read that stands at a record's place."""
    num_rows: int
    num_bytes: int
    mtime_ns: int
    copies: str | None = None
    """File beside the index with its rows as lines, where it can only be read from its beginning on."""
    copied_bytes: int = 0


@dataclass
class Summary:
    """What an index says of its source."""

    files: list[IndexedFile] = field(default_factory=list)
    dropped: DroppedRows = field(default_factory=DroppedRows)
    columns: list[str] = field(default_factory=list)
    """Those that any of the rows has."""
    has_tools: bool = False
    num_lines: int = 0
    """Of a part of a file with plain lines, blank ones included."""

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def add_files(self, files: Sequence[IndexedFile]) -> None:
        """Those of the rows behind; one that goes on where the last one ended becomes one with it."""
        for file in files:
            last = self.files[-1] if self.files else None
            if last is not None and file.copies is None and replace(last, num_rows=file.num_rows) == file:
                self.files[-1] = replace(last, num_rows=last.num_rows + file.num_rows)
            else:
                self.files.append(file)

    def encoded(self) -> bytes:
        dropped = {**vars(self.dropped), "bad": dict(self.dropped.bad)}
        files = [asdict(file) for file in self.files]
        return json.dumps({**vars(self), "files": files, "dropped": dropped}).encode()

    @classmethod
    def decoded(cls, text: bytes) -> "Summary":
        values: dict[str, Any] = json.loads(text)
        dropped = values["dropped"]
        values["dropped"] = DroppedRows(**{**dropped, "bad": Counter(dropped["bad"])})
        values["files"] = [IndexedFile(**file) for file in values["files"]]
        return cls(**values)


@dataclass(frozen=True)
class RowIndex:
    """`records` [rows] are mapped from a file: processes of a node share them, and only what is asked for is read."""

    path: Path
    records: Records
    summary: Summary


class IndexWriter:
    """Writes records behind each other, then the summary."""

    def __init__(self, file: Any, *, with_difficulties: bool) -> None:
        self._file, self.dtype = file, SORTED_RECORD if with_difficulties else RECORD
        self._buffered: list[tuple[int, ...] | tuple[int, int, float]] = []
        file.write(MAGIC)

    def add(self, place: int, number: int, difficulty: float) -> None:
        is_sorted = self.dtype == SORTED_RECORD
        self._buffered.append((place, number, difficulty) if is_sorted else (place, number))
        if len(self._buffered) == BUFFERED_ROWS:
            self._flush()

    def extend(self, records: Records) -> None:
        self._flush()
        self._file.write(records.tobytes())

    def finish(self, summary: Summary) -> None:
        self._flush()
        text = summary.encoded()
        lengths = np.array([len(text), zlib.crc32(text), self.dtype.itemsize], "<u8")
        self._file.write(text + lengths.tobytes() + MAGIC)

    def _flush(self) -> None:
        self._file.write(np.array(self._buffered, self.dtype).tobytes())
        self._buffered.clear()


@contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[Any]:
    """A binary file that appears under its name once it is written to its end, or not at all; if `durable`, though the
    machine fails."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_index(path: Path) -> RowIndex:
    """FileNotFoundError where there is none; DamagedIndexError for a file that is cut off or something else."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        begins = file.read(len(MAGIC)) == MAGIC
        tail = 3 * 8 + len(MAGIC)
        if not begins or num_bytes < len(MAGIC) + tail:
            raise DamagedIndexError("it does not begin as one")
        file.seek(num_bytes - tail)
        end = file.read(tail)
        length, checksum, width = (int(value) for value in np.frombuffer(end[: 3 * 8], "<u8"))
        if end[3 * 8 :] != MAGIC or length > num_bytes:
            raise DamagedIndexError("it is cut off")
        file.seek(num_bytes - tail - length)
        text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise DamagedIndexError("its summary has another checksum")
    summary = Summary.decoded(text)
    if num_bytes != len(MAGIC) + summary.num_rows * width + length + tail:
        raise DamagedIndexError(f"it has {num_bytes} bytes, which {summary.num_rows} rows do not take")
    dtype = SORTED_RECORD if width == SORTED_RECORD.itemsize else RECORD
    _check_copies(path.parent, summary.files)
    if not summary.num_rows:  # of a part, and nothing can be mapped
        return RowIndex(path, np.empty(0, dtype), summary)
    records = np.memmap(path, dtype, mode="r", offset=len(MAGIC), shape=(summary.num_rows,))
    return RowIndex(path, records, summary)


def _check_copies(folder: Path, files: Sequence[IndexedFile]) -> None:
    for file in files:
        if file.copies is not None:
            path = folder / file.copies
            if not path.is_file() or path.stat().st_size < file.copied_bytes:
                raise DamagedIndexError(f"{path.name} beside it is missing or cut off")
