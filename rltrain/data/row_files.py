"""Files with rows, and those that a source names, with the part of their rows that it means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from rltrain.config import schema
from rltrain.data.file_kinds import KNOWN, Kind, kind_of
from rltrain.data.json_lines import is_compressed, is_list, read_lines, read_list
from rltrain.data.locations import Location
from rltrain.data.rows import BadRow, Keys, PlacedRows, Row
from rltrain.data.tables import read_table
from rltrain.errors import DataError


@dataclass(frozen=True)
class RowFile:
    path: Path
    kind: Kind
    is_list: bool
    """One JSON list, where others have a line for each row."""
    num_bytes: int
    mtime_ns: int
    """When it was written last. Both as it was found, before its rows were read."""

    @classmethod
    def of(cls, path: Path, config_key: str) -> "RowFile":
        """Raises DataError for a file that is of an unknown kind or cannot be opened."""
        kind = kind_of(path)
        if kind is None:
            raise DataError(f"{config_key}: {str(path)!r} is of an unknown kind; expected a file that ends in {KNOWN}")
        try:
            state = path.stat()
        except OSError as error:
            raise DataError(f"{config_key}: {str(path)!r} cannot be read: {error}") from error
        return cls(path, kind, kind == "json" and is_list(path, config_key), state.st_size, state.st_mtime_ns)

    @cached_property
    def prefix(self) -> str:
        """What a row's origin begins with; its number follows."""
        if self.kind == "json":
            return f"{self.path} item " if self.is_list else f"{self.path}:"
        return f"{self.path} row "

    @property
    def has_plain_lines(self) -> bool:
        """Whether the file can be read from the byte on at which a row begins."""
        return self.kind == "json" and not self.is_list and not is_compressed(self.path)

    def rows(self, keys: Keys, config_key: str) -> PlacedRows:
        """All of them. Raises DataError for a file that cannot be read."""
        if self.kind != "json":
            return read_table(self.path, keys, config_key)
        return read_list(self.path, config_key) if self.is_list else read_lines(self.path, config_key)


@dataclass(frozen=True)
class FileSlice:
    """The rows `first` up to `end` of several files together."""

    files: tuple[RowFile, ...]
    first: int = 0
    end: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.end is None

    @property
    def num_bytes(self) -> int:
        """Of whole files."""
        return sum(file.num_bytes for file in self.files)

    def rows(self, keys: Keys, config_key: str) -> "Iterator[FileRow]":
        """Raises DataError for a file that cannot be read."""
        rows = ((file, *row) for file in self.files for row in file.rows(keys, config_key))
        return islice(rows, self.first, self.end)


FileRow = tuple[RowFile, int, int, Row | BadRow]
"""(its file, and as PlacedRows)"""


def slice_of(path: str, config_key: str, subset: str | None, split: str | None) -> FileSlice:
    """What `path`, of the config, stands for. Raises DataError for what is not there."""
    location = Location.of(path, config_key)
    files = tuple(RowFile.of(file, config_key) for file in location.files(config_key, subset, split))
    return FileSlice(files, location.first, location.end)


def slices_of(source: schema.PromptSource, config_key: str) -> list[FileSlice]:
    """Of `source`, one for each of its paths; `config_key` names the setting that they come from. As slice_of."""
    paths = (source.path,) if isinstance(source.path, str) else source.path
    return [slice_of(path, config_key, source.subset, source.split) for path in paths]


def rows_of(slices: Sequence[FileSlice], keys: Keys, config_key: str) -> Iterator[FileRow]:
    """One after the other. Raises DataError for a file that cannot be read."""
    return chain.from_iterable(one.rows(keys, config_key) for one in slices)
