"""One row of a file, wherever it stands."""

import os
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import pyarrow
from pyarrow import ipc, parquet

from rltrain.data.json_lines import parse_line
from rltrain.data.row_index import IndexedFile
from rltrain.data.rows import BadRow, Keys, Row, is_column_of
from rltrain.data.tables import rows_of
from rltrain.errors import DataError

READ_BYTES = 4096
KEPT_BYTES = 256 * 2**20
"""Of row groups that were read last, of one file."""


class RowAccess(Protocol):
    """Of a file that stays as it was when its rows were checked."""

    def at(self, place: int, keys: Keys) -> Row | BadRow:
        """What stands there, at least the columns that have `keys`. OSError and pyarrow's errors."""


def open_rows(file: IndexedFile, folder: Path) -> RowAccess:
    """`folder` is the index's. DataError where the file is not the one that was checked."""
    if file.copies is not None:
        return LineAccess(folder / file.copies)
    try:
        return LineAccess(Path(file.path), file) if file.reads == "lines" else TableAccess(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path} cannot be read any more: {error}") from error


def _refuse_changed(found: os.stat_result, file: IndexedFile) -> None:
    if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise DataError(
            f"{file.path} has changed since its rows were checked: it had {file.num_bytes} bytes then and has "
            f"{found.st_size} now, and was written since; expected files of rows to stay as they are while a job reads "
            "them. Start the job again, which checks them anew"
        )


class LineAccess:
    def __init__(self, path: Path, file: IndexedFile | None = None) -> None:
        """`file`: as which it is to be, at every read."""
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
    """Of Parquet files the row group is read that the row is in; Arrow's are mapped."""

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
            return rows_of(group.select(chosen).slice(place - self._firsts[number], 1))[0]

    def _read_group(self, number: int, keys: Keys) -> Any:
        names = self._parquet.schema_arrow.names
        chosen = [name for name in names if keys is None or any(is_column_of(name, key) for key in keys)]
        return self._parquet.read_row_group(number, columns=chosen)


def _arrow_batches(path: Path) -> list[Any]:
    """Of either form; they stand in the mapped file, not in memory."""
    memory = pyarrow.memory_map(str(path))
    try:
        file = ipc.open_file(memory)
        return [file.get_batch(number) for number in range(file.num_record_batches)]
    except pyarrow.ArrowInvalid:
        memory.seek(0)
        return list(ipc.open_stream(memory))
