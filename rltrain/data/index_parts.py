"""Parts of a source, each checked and indexed by itself, by whichever process comes first."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.data.json_lines import count_lines, read_lines
from rltrain.data.row_checks import RowChecker
from rltrain.data.row_files import FileRow, FileSlice, RowFile, rows_of
from rltrain.data.row_index import IndexedFile, IndexWriter, Summary, written_whole
from rltrain.data.rows import Keys
from rltrain.data.tables import column_names

PART_BYTES = 16 * 2**20
"""Of a file with plain lines."""
ADVANCE_ROWS = 2**12


@dataclass(frozen=True)
class Part:
    """Slices of files; or of one file with plain lines those that begin at the bytes `begin` up to `end`."""

    slices: Sequence[FileSlice]
    begin: int = 0
    end: int | None = None

    def rows(self, keys: Keys, config_key: str) -> Iterator[FileRow]:
        """Numbers of rows count from the part's beginning."""
        if self.end is None:
            return rows_of(self.slices, keys, config_key)
        file = self.slices[0].files[0]
        return ((file, *row) for row in read_lines(file.path, config_key, self.begin, self.end))

    def num_before(self) -> int:
        """Lines of the file before the part."""
        return count_lines(self.slices[0].files[0].path, 0, self.begin) if self.begin else 0

    def num_lines(self) -> int:
        """Of a file with plain lines that is in parts; else 0."""
        return 0 if self.end is None else count_lines(self.slices[0].files[0].path, self.begin, self.end)


def parts_of(source: schema.PromptSource, slices: Sequence[FileSlice]) -> list[Part]:
    """One where it matters for a row how many come before; else at least one for each file."""
    if source.max_rows is not None or not all(one.is_whole for one in slices):
        return [Part(slices)]
    return [part for one in slices for file in one.files for part in _parts_of_file(file)]


def _parts_of_file(file: RowFile) -> list[Part]:
    whole, num_bytes = (FileSlice((file,)),), file.num_bytes
    if not file.has_plain_lines or num_bytes <= PART_BYTES:
        return [Part(whole)]
    return [Part(whole, begin, end) for begin, end in pairwise([*range(0, num_bytes, PART_BYTES), num_bytes])]


def index_part(part: Part, checker: RowChecker, path: Path, advance: Callable[[], None]) -> None:
    """Write the index of the part's usable rows to `path`. DataError as of RowChecker."""
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
    """Rows as lines, of files that can only be read from their beginning on."""

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
