"""The index of a large source: the places of its usable rows. All processes of a job make it together, once."""

import hashlib
import json
import logging
import os
import time
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow
from pyarrow import ipc, parquet

from rltrain.config import schema
from rltrain.data.prompt_rows import DroppedRows, PromptRow, RowChecker, RowParser, refuse_unusable_source
from rltrain.data.rows import (
    BadRow,
    FileRow,
    FileSlice,
    Keys,
    Row,
    RowFile,
    column_names,
    count_lines,
    is_column_of,
    parse_line,
    read_lines,
    rows_of,
    rows_of_table,
)
from rltrain.errors import DataError, cannot_write
from rltrain.runtime.whole_files import written_whole

if TYPE_CHECKING:
    from rltrain.runtime.job_store import JobStore

# The index file has records of the usable rows and a summary. With it the rows need not be held in memory.

MAGIC = b"RLTRROWS"
FORMAT = 1
"""Part of an index's name, so indexes of another format are ignored."""
RECORD = np.dtype([("place", "<i8"), ("number", "<i8")])
SORTED_RECORD = np.dtype([*RECORD.descr, ("difficulty", "<f8")])
"""A record with the difficulty that a curriculum sorts by."""
BUFFERED_ROWS = 2**14
Records = npt.NDArray[np.void]


class DamagedIndexError(Exception):
    """A file is no usable index. The message says why."""


@dataclass(frozen=True)
class IndexedFile:
    """`num_rows` rows of a file, with the file's size and time when they were checked."""

    path: str
    prefix: str
    """The beginning of the origin of its rows."""
    reads: Literal["lines", "parquet", "arrow"]
    """The way to read a row at a record's place."""
    num_rows: int
    num_bytes: int
    mtime_ns: int
    copies: str | None = None
    """Name of a file next to the index with copies of the rows as lines. Set if the rows' own file can only be read
    from its beginning."""
    copied_bytes: int = 0


@dataclass
class Summary:
    """An index's description of its source."""

    files: list[IndexedFile] = field(default_factory=list)
    dropped: DroppedRows = field(default_factory=DroppedRows)
    columns: list[str] = field(default_factory=list)
    """The columns that any of the rows has."""
    has_tools: bool = False
    num_lines: int = 0
    """Lines of a part of a file with plain lines, including blank ones."""

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def add_files(self, files: Sequence[IndexedFile]) -> None:
        """Adds the files of later rows. A file that continues the last one is merged with it."""
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
    """An open index. `records` have shape [rows] and are mapped from a file.

    So processes of a node share them, and only the records in use are read.
    """

    path: Path
    records: Records
    summary: Summary


class IndexWriter:
    """A writer of records, one after another, and of the summary after them."""

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


def open_index(path: Path) -> RowIndex:
    """Opens an index. Raises FileNotFoundError if there is none, and DamagedIndexError if the file is cut off or no
    index."""
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
        raise DamagedIndexError(f"its {num_bytes} bytes do not fit {summary.num_rows} rows")
    dtype = SORTED_RECORD if width == SORTED_RECORD.itemsize else RECORD
    _check_copies(path.parent, summary.files)
    if not summary.num_rows:  # a part may have no rows, and nothing can be mapped then
        return RowIndex(path, np.empty(0, dtype), summary)
    records = np.memmap(path, dtype, mode="r", offset=len(MAGIC), shape=(summary.num_rows,))
    return RowIndex(path, records, summary)


def _check_copies(folder: Path, files: Sequence[IndexedFile]) -> None:
    for file in files:
        if file.copies is not None:
            path = folder / file.copies
            if not path.is_file() or path.stat().st_size < file.copied_bytes:
                raise DamagedIndexError(f"{path.name} beside it is missing or cut off")


# Parts of a source. Each part is checked and indexed alone, by the first process to claim it.

PART_BYTES = 16 * 2**20
"""Bytes of a part of a file with plain lines."""
ADVANCE_ROWS = 2**12


@dataclass(frozen=True)
class SourcePart:
    """A part of a source: slices of files, or lines of one plain file.

    The lines begin at the bytes from `begin` up to `end` (exclusive).
    """

    slices: Sequence[FileSlice]
    begin: int = 0
    end: int | None = None

    def rows(self, keys: Keys, config_key: str) -> Iterator[FileRow]:
        """Returns the part's rows. Their numbers count from the part's beginning."""
        if self.end is None:
            return rows_of(self.slices, keys, config_key)
        file = self.slices[0].files[0]
        return ((file, *row) for row in read_lines(file.path, config_key, self.begin, self.end))

    def num_before(self) -> int:
        """Returns the number of lines of the file before the part."""
        return count_lines(self.slices[0].files[0].path, 0, self.begin) if self.begin else 0

    def num_lines(self) -> int:
        """Returns the number of lines of the part if its plain file is divided, else 0."""
        return 0 if self.end is None else count_lines(self.slices[0].files[0].path, self.begin, self.end)


def parts_of(source: schema.PromptSource, slices: Sequence[FileSlice]) -> list[SourcePart]:
    """Returns the parts of a source, at least one per file. It is one part if rows have to be counted from the
    beginning."""
    if source.max_rows is not None or not all(one.is_whole for one in slices):
        return [SourcePart(slices)]
    return [part for one in slices for file in one.files for part in _parts_of_file(file)]


def _parts_of_file(file: RowFile) -> list[SourcePart]:
    whole, num_bytes = (FileSlice((file,)),), file.num_bytes
    if not file.has_plain_lines or num_bytes <= PART_BYTES:
        return [SourcePart(whole)]
    return [SourcePart(whole, begin, end) for begin, end in pairwise([*range(0, num_bytes, PART_BYTES), num_bytes])]


def index_part(part: SourcePart, checker: RowChecker, path: Path, advance: Callable[[], None]) -> None:
    """Writes the index of the part's usable rows to `path`. Raises DataError like RowChecker."""
    parser, key = checker.parser, checker.key
    with_difficulties = parser.difficulty_key is not None
    rows = part.rows(parser.keys, f"{key}.path")
    with written_whole(path, durable=False) as file, ExitStack() as stack:
        writer = IndexWriter(file, with_difficulties=with_difficulties)
        copies = _Copies(path.with_name(f"{path.name}.copies"), stack)
        columns: set[str] = set()
        runs: list[tuple[RowFile, int]] = []
        copied = False
        for of_file, place, row, difficulty, values in checker.usable(rows, cache(part.num_before)):
            if not runs or runs[-1][0] is not of_file:
                runs.append((of_file, 0))
                copied = _needs_copies(of_file)
            writer.add(copies.add(values) if copied else place, row.number, difficulty)
            runs[-1] = of_file, runs[-1][1] + 1
            columns.update(values)
            if checker.num_usable % ADVANCE_ROWS == 0:
                advance()
        files = [_indexed(file, count, copies) for file, count in runs]
        columns.update(
            name for file in {file for file, _ in runs} if file.kind != "json" for name in column_names(file.path)
        )
        advance()
        writer.finish(Summary(files, checker.dropped, sorted(columns), checker.has_tools, part.num_lines()))


def _needs_copies(file: RowFile) -> bool:
    return file.kind == "json" and not file.has_plain_lines


class _Copies:
    """The rows as lines, copied from files that can only be read from their beginning."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self.num_bytes = path, 0
        self._stack = stack
        self._file: Any = None

    def add(self, values: Any) -> int:
        if self._file is None:
            self._file = self._stack.enter_context(written_whole(self.path))
        line, place = json.dumps(values).encode() + b"\n", self.num_bytes
        self._file.write(line)
        self.num_bytes += len(line)
        return place


def _indexed(file: RowFile, num_rows: int, copies: _Copies) -> IndexedFile:
    reads = "lines" if file.kind == "json" else file.kind
    found = IndexedFile(str(file.path.absolute()), file.prefix, reads, num_rows, file.num_bytes, file.mtime_ns)
    if _needs_copies(file):
        return replace(found, copies=copies.path.name, copied_bytes=copies.num_bytes)
    return found


# The index of a source. All processes of a job that need it make it together, or find the index of an earlier job.

logger = logging.getLogger(__name__)

BLOCK_ROWS = 2**20
APPEARS_WITHIN_S, LOOK_S = 60.0, 0.5
"""Seconds for a file of another node to appear on a shared file system, and seconds between two checks."""


@dataclass(frozen=True)
class IndexFolder:
    """The folder of indexes, and the job whose processes divide the work of making them."""

    path: Path
    job_store: "JobStore"

    def claim(self, key: str) -> int:
        """Returns 0, 1, 2, ...: each number once, to one of the processes that call this."""
        return int(self.job_store.store.add(f"claimed/{key}", 1)) - 1

    def tell(self, key: str, text: str) -> None:
        """Publishes a text to all processes."""
        self.job_store.put(f"told/{key}", text)

    def hear(self, key: str, what: str) -> str:
        """Waits for a published text and returns it. Raises StallError, naming `what`, if it does not come."""
        return str(self.job_store.get(f"told/{key}", what))

    def advance(self) -> None:
        """Reports progress of this process."""
        self.job_store.heartbeat.advance()


def shared_index(
    folder: IndexFolder, parser: RowParser, data: schema.Data, key: str, slices: Sequence[FileSlice]
) -> RowIndex:
    """Returns the index of a source. `key` is the source's config key, and `slices` are its files.

    Processes that call this while it is being made check parts of it. All return once it is complete. Raises DataError
    like RowChecker, and if no row is usable. Raises ConfigError if the folder cannot be written.
    """
    name = fingerprint(parser, data, slices)
    path = folder.path / f"{name}.index"
    if folder.claim(f"{name}/looked") == 0:
        folder.tell(f"{name}/is_there", "yes" if _is_there(path) else "no")
    if folder.hear(f"{name}/is_there", f"the index of {key}") == "no":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, parser, data, key, slices, folder)
        except OSError as error:
            raise cannot_write(path, error) from error
        folder.hear(f"{name}/made", f"the index of {key}, while its rows are checked")
    return _opened(path)


def fingerprint(parser: RowParser, data: schema.Data, slices: Sequence[FileSlice]) -> str:
    """Returns a hash of everything that determines the usable rows and their places."""
    decisive = {
        "format": FORMAT,
        "files": [(str(file.path.absolute()), file.num_bytes, file.mtime_ns) for one in slices for file in one.files],
        "source": parser.source.model_dump(mode="json", exclude={"weight", "name"}),
        "needs": parser.needs,
        "difficulty": parser.difficulty_key,
        "lengths": (data.max_prompt_tokens, data.on_bad_row),
        "samples": (data.max_response_tokens, data.on_long_row, *astuple(parser.model)),
        "encoder": parser.encoder.fingerprint(),
    }
    if parser.encoder.images is not None:
        decisive["images"] = data.images.check
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:24]


def _is_there(path: Path) -> bool:
    try:
        open_index(path)
    except FileNotFoundError:
        return False
    except DamagedIndexError as problem:
        logger.warning("%s is damaged (%s), so the rows are checked again", path, problem)
        return False
    return True


def _opened(path: Path) -> RowIndex:
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while True:
        try:
            return open_index(path)
        except (FileNotFoundError, DamagedIndexError) as error:
            if time.monotonic() > deadline:
                raise DataError(
                    f"{path} was written by another rank, but this rank cannot read it ({error}); expected output_dir "
                    "to be a folder shared by all nodes"
                ) from error
        time.sleep(LOOK_S)


def _make(
    path: Path, parser: RowParser, data: schema.Data, key: str, slices: Sequence[FileSlice], folder: IndexFolder
) -> None:
    """Checks parts until none are left. The process with the last part joins all of them."""
    name, parts = path.stem, parts_of(parser.source, slices)
    files = [path.with_name(f"{name}.part{number}") for number in range(len(parts))]
    began = time.monotonic()
    while (number := folder.claim(f"{name}/part")) < len(parts):
        index_part(parts[number], RowChecker(parser, data, key), files[number], folder.advance)
        if folder.claim(f"{name}/checked") == len(parts) - 1:
            summary = _join(parts, files, path, RowChecker(parser, data, key), folder)
            seconds = time.monotonic() - began
            logger.warning("%s: %s rows are indexed in %s (%.0f s)", key, f"{summary.num_rows:,}", path, seconds)
            folder.tell(f"{name}/made", "yes")


def _join(
    parts: Sequence[SourcePart], files: Sequence[Path], path: Path, checker: RowChecker, folder: IndexFolder
) -> Summary:
    """Writes the index from the parts in `files`, and removes the parts."""
    whole = Summary()
    found = [open_index(file).summary for file in files]
    for summary in found:
        whole.dropped.add(summary.dropped)
        whole.has_tools = whole.has_tools or summary.has_tools
    whole.columns = sorted({column for summary in found for column in summary.columns})
    num_usable = sum(summary.num_rows for summary in found)
    refuse_unusable_source(checker, num_usable=num_usable, has_tools=whole.has_tools, dropped=whole.dropped)
    with written_whole(path) as file:
        writer, num_lines = IndexWriter(file, with_difficulties=checker.parser.difficulty_key is not None), 0
        for part, of_part, summary in zip(parts, files, found, strict=True):
            num_lines = num_lines if part.begin else 0
            _append(writer, of_part, num_lines)
            num_lines += summary.num_lines
            whole.add_files(summary.files)
            folder.advance()
        writer.finish(whole)
    for of_part in files:
        of_part.unlink()
    return whole


def _append(writer: IndexWriter, path: Path, num_lines: int) -> None:
    """Appends the records of a part with `num_lines` lines of its file before it."""
    records = open_index(path).records
    for first in range(0, len(records), BLOCK_ROWS):
        block = np.array(records[first : first + BLOCK_ROWS])
        block["number"] += num_lines
        writer.extend(block)


# Access to one row of a file.

READ_BYTES = 4096
KEPT_BYTES = 256 * 2**20
"""Bytes of recently read row groups kept per file."""


def _refuse_changed(found: os.stat_result, file: IndexedFile) -> None:
    if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise DataError(
            f"{file.path} has changed since its rows were checked (it had {file.num_bytes} bytes and has "
            f"{found.st_size} now). Files of rows must not change while a job reads them: start the job again to "
            "check the new rows"
        )


class LineAccess:
    def __init__(self, path: Path, file: IndexedFile | None = None) -> None:
        """`file` is the expected state of the file. It is compared at every read."""
        self._file = file
        self._descriptor = os.open(path, os.O_RDONLY)

    def at(self, place: int, keys: Keys) -> Row | BadRow:  # noqa: ARG002 - a line is parsed as a whole
        if self._file is not None:
            _refuse_changed(os.fstat(self._descriptor), self._file)
        line = b""
        while b"\n" not in (block := os.pread(self._descriptor, READ_BYTES + len(line), place + len(line))) and block:
            line += block
        return parse_line(line + block.partition(b"\n")[0])

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class TableAccess:
    """The rows of a Parquet or Arrow file. Parquet files are read by row group, Arrow files are mapped."""

    def __init__(self, file: IndexedFile) -> None:
        self._file, self._lock = file, Lock()
        _refuse_changed(os.stat(file.path), file)
        if file.reads == "parquet":
            self._parquet = parquet.ParquetFile(file.path)
            metadata = self._parquet.metadata
            sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            largest = max(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            self._group = lru_cache(maxsize=max(1, KEPT_BYTES // max(largest, 1)))(self._read_group)
        else:
            self._batches = _arrow_batches(Path(file.path))
            sizes = [batch.num_rows for batch in self._batches]
            self._group = lambda number, _: self._batches[number]
        self._firsts = [0, *accumulate(sizes)]

    def at(self, place: int, keys: Keys) -> Row | BadRow:
        with self._lock:
            _refuse_changed(os.stat(self._file.path), self._file)
            number = bisect_right(self._firsts, place) - 1
            group = self._group(number, None if keys is None else frozenset(keys))
            names = group.schema.names
            chosen = [name for name in names if keys is None or any(is_column_of(name, key) for key in keys)]
            return rows_of_table(group.select(chosen).slice(place - self._firsts[number], 1))[0]

    def _read_group(self, number: int, keys: Keys) -> Any:
        names = self._parquet.schema_arrow.names
        chosen = [name for name in names if keys is None or any(is_column_of(name, key) for key in keys)]
        return self._parquet.read_row_group(number, columns=chosen)


def open_rows(file: IndexedFile, folder: Path) -> LineAccess | TableAccess:
    """Opens a file for access to its rows. `folder` is the index's. Raises DataError if the file has changed since the
    check."""
    if file.copies is not None:
        return LineAccess(folder / file.copies)
    try:
        return LineAccess(Path(file.path), file) if file.reads == "lines" else TableAccess(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path} cannot be read any more: {error}") from error


def _arrow_batches(path: Path) -> list[Any]:
    """Returns the batches of either Arrow format. They are in the mapped file, not in memory."""
    memory = pyarrow.memory_map(str(path))
    try:
        file = ipc.open_file(memory)
        return [file.get_batch(number) for number in range(file.num_record_batches)]
    except pyarrow.ArrowInvalid:
        memory.seek(0)
        return list(ipc.open_stream(memory))


# A sequence that is computed instead of held in memory.

Item = TypeVar("Item")


class ComputedSequence(Sequence[Item], ABC):
    """A sequence that makes an item at every access."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Returns the item at `index`, from 0 to len(self) - 1."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self.item(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.item(index % len(self))


# The rows of a source by its index. They are parsed at access and not held in memory.

KEPT_ROWS = 1024
KEPT_IMAGE_ROWS = 64
"""Rows kept in runs that see. A row may have megabytes of images."""
OPEN_FILES = 64


class IndexedRows(ComputedSequence[PromptRow]):
    """The usable rows of an indexed source. Safe to use from several threads."""

    def __init__(self, index: RowIndex, parser: RowParser) -> None:
        self.row_index, self.parser = index, parser
        self._firsts = [0, *accumulate(file.num_rows for file in index.summary.files)]
        self._row = lru_cache(maxsize=KEPT_ROWS if parser.encoder.images is None else KEPT_IMAGE_ROWS)(self._parse)
        self._file = lru_cache(maxsize=OPEN_FILES)(self._open)

    def __len__(self) -> int:
        return len(self.row_index.records)

    def item(self, index: int) -> PromptRow:
        """Returns a row. Raises DataError if the file has changed since its rows were checked."""
        return self._row(index)

    def values(self, index: int, keys: Keys) -> tuple[str, Row]:
        """Returns a row's origin and its values in the columns with `keys`, perhaps with others. Raises DataError like
        `item`."""
        prefix, number, values = self._read(index, keys)
        if isinstance(values, BadRow):
            raise DataError(f"{prefix}{number}: the row {values}, and was usable when it was checked")
        return f"{prefix}{number}", values

    def _parse(self, index: int) -> PromptRow:
        prefix, number, values = self._read(index, self.parser.keys)
        try:
            return self.parser.parse(values, prefix, number)
        except BadRow as problem:
            raise DataError(f"{prefix}{number}: the row {problem}, and was usable when it was checked") from None

    def _read(self, index: int, keys: Keys) -> tuple[str, int, Row | BadRow]:
        of_file = bisect_right(self._firsts, index) - 1
        file, record = self.row_index.summary.files[of_file], self.row_index.records[index]
        place, number = int(record["place"]), int(record["number"])
        try:
            return file.prefix, number, self._file(of_file).at(place, keys)
        except (DataError, OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file.prefix}{number}: {error}") from error

    def _open(self, number: int) -> LineAccess | TableAccess:
        return open_rows(self.row_index.summary.files[number], self.row_index.path.parent)


# Several sequences as one.


class Chained(ComputedSequence[Item]):
    """Several sequences, one after another, as one. Nothing is copied."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts = parts
        self._firsts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def item(self, index: int) -> Item:
        part = bisect_right(self._firsts, index) - 1
        return self.parts[part][index - self._firsts[part]]
