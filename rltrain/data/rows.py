"""Reads rows of JSON, Parquet and Arrow files, and of folders of them."""

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import yaml
from pyarrow import ipc, parquet, types

from rltrain.config import schema
from rltrain.errors import DataError, one_of
from rltrain.runtime.json_text import lone_surrogate, parse_json, read_json, too_many_digits

# One row of a file of any kind.

Row = Mapping[str, Any]


class Struct(dict[str, Any]):
    """An object in a Parquet or Arrow column. It has null for fields that only other rows' objects have."""


NO_KEY = "no key "


class BadRow(Exception):  # noqa: N818 - a finding about data, which on_bad_row may turn into an error
    """The problem of one row. `reason` is the name under which it is counted."""

    def __init__(self, problem: object, reason: str = "unusable value") -> None:
        super().__init__(problem)
        self.reason = reason

    @property
    def is_missing(self) -> bool:
        """Whether the row lacks a key."""
        return self.reason.startswith(NO_KEY)


Rows = Iterator[tuple[str, Row | BadRow]]
"""(origin, row or its problem). The origin is file and place, for messages."""

PlacedRows = Iterator[tuple[int, int, Row | BadRow]]
"""(number in its file from 1, place, row or its problem). The place of a line is its first byte. Elsewhere it is the
number less 1."""

Keys = Collection[str] | None
"""The keys that the caller will look up. None means any key."""


class KeysOfRows(frozenset[str]):
    """Keys to look up, of which rows may lack those in `optional`."""

    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, needed: Collection[str], optional: Collection[str]) -> "KeysOfRows":
        keys = cls({*needed, *optional})
        keys.optional = frozenset(optional)
        return keys


def look_up(row: Row, key: str) -> Any:
    """Returns row[key]. A key with dots that is no key itself leads into nested objects.

    Raises BadRow if the key is missing, or if its value has a text that no tokenizer can read.
    """
    value = _found(row, key)
    if (half := lone_surrogate(value)) is not None:
        raise BadRow(f"has a text under {key!r} with {half!r}, half of a surrogate pair; expected Unicode")
    return value


def _found(row: Row, key: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            keys = ", ".join(map(repr, row)) or "none"
            raise BadRow(f"has no key {key!r}; its keys are {keys}", reason=f"{NO_KEY}{key!r}")
        value = value[name]
    return value


def is_column_of(column: str, key: str) -> bool:
    """Returns whether `look_up` finds `key` in this column."""
    return key == column or key.startswith(f"{column}.")


# Kinds of files with rows, by the ends of their names.

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes that may follow one of JSON_SUFFIXES."""
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
KNOWN = (
    f"{', '.join((*JSON_SUFFIXES, *PARQUET_SUFFIXES, *ARROW_SUFFIXES))}, or JSON and {', '.join(COMPRESSED_SUFFIXES)}"
)

Kind = Literal["json", "parquet", "arrow"]


def kind_of(path: Path) -> Kind | None:
    """Returns the kind of a file by its name, or None if it is unknown."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        return "json" if Path(path.stem).suffix.lower() in JSON_SUFFIXES else None
    if suffix in JSON_SUFFIXES:
        return "json"
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    return "arrow" if suffix in ARROW_SUFFIXES else None


def has_rows(path: Path) -> bool:
    """Returns whether `path` is of a known kind and not hidden."""
    return kind_of(path) is not None and not path.name.startswith(".")


# Rows of JSON files: one object per line, or one list of objects. Files may be compressed.

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
NO_OBJECT = "no JSON object"
"""The name under which rows without an object are counted."""
COUNTED_BYTES = 2**20


def _open_zstd(path: Path) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


def is_list(path: Path, config_key: str) -> bool:
    """Returns whether the file is one JSON list. Its name must end in .json. Raises DataError like read_lines."""
    if _inner_suffix(path) != ".json":
        return False
    with _opened(path, config_key) as file:
        return bool(file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))


def read_lines(path: Path, config_key: str, begin: int = 0, end: int | None = None) -> PlacedRows:
    """Yields the lines that begin at the bytes from `begin` up to `end` (exclusive; None: all), numbered from 1.

    Blank lines are no rows. Raises DataError if the file cannot be read or unpacked.
    """
    with _opened(path, config_key) as lines:
        place = 0
        if begin > 0:
            lines.seek(begin - 1)
            place = begin - 1 + len(lines.readline())
        for number, line in enumerate(lines, start=1):
            if end is not None and place >= end:
                return
            if line.strip():
                yield number, place, parse_line(line)
            place += len(line)


def read_list(path: Path, config_key: str) -> PlacedRows:
    """Yields the items of a JSON list. Raises DataError if the file cannot be read or unpacked, or is no list."""
    with _opened(path, config_key) as file:
        try:
            items = parse_json(file.read().decode("utf-8-sig"), parse_int=_whole_number)
        except ValueError as error:
            raise DataError(f"{config_key}: {str(path)!r} begins as a JSON list but is not valid: {error}") from error
    for number, item in enumerate(items, start=1):
        yield number, number - 1, _row_of(item)


class _TooLong:
    """A stand-in for a whole number with too many digits, so it spoils only its item."""


def _whole_number(digits: str) -> int | _TooLong:
    try:
        return int(digits)
    except ValueError:
        return _TooLong()


def _row_of(item: Any) -> Row | BadRow:
    if not isinstance(item, dict):
        return BadRow(f"is a JSON {type(item).__name__}; expected an object", NO_OBJECT)
    return BadRow(f"cannot be read: {too_many_digits()}", NO_OBJECT) if _has_too_long(item) else item


def _has_too_long(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_too_long, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _TooLong)


def count_lines(path: Path, begin: int, end: int) -> int:
    """Returns the number of lines that begin at the bytes from `begin` up to `end` (exclusive) of an uncompressed file.

    `end` is at most the file's size.
    """
    count, left = int(begin == 0 < end), end - max(begin, 1)
    with path.open("rb", buffering=0) as file:
        file.seek(max(begin - 1, 0))
        while left > 0 and (block := file.read(min(left, COUNTED_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def parse_line(line: bytes) -> Row | BadRow:
    """Returns the row of a line that is not blank, or its problem."""
    try:
        row = parse_json(line.rstrip().removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8: {error}", NO_OBJECT)
    except json.JSONDecodeError as error:
        return BadRow(f"is not JSON: {error.msg} at column {error.colno}", NO_OBJECT)
    except ValueError as error:
        return BadRow(f"cannot be read: {error}", NO_OBJECT)
    if isinstance(row, dict):
        return row
    return BadRow(f"is a JSON {type(row).__name__}; expected one JSON object per line", NO_OBJECT)


def _inner_suffix(path: Path) -> str:
    return Path(path.stem if is_compressed(path) else path.name).suffix.lower()


@contextmanager
def _opened(path: Path, config_key: str) -> Iterator[Any]:
    opener = OPENERS.get(path.suffix.lower())
    try:
        with opener(path) if opener else path.open("rb") as file:
            yield file
    except BROKEN as error:
        raise DataError(f"{config_key}: {str(path)!r} cannot be read: {error}") from error


# Rows of Parquet and Arrow files, batch by batch.

BATCH_ROWS = 4096
BATCH_BYTES = 64 * 2**20
"""Most rows and bytes of a batch. Rows with images may have megabytes each."""
EXACT = 2.0**53
"""Python's floats can hold all whole numbers below it."""


def read_table(path: Path, keys: Keys, config_key: str) -> PlacedRows:
    """Yields the rows of a Parquet or Arrow file. Of Parquet files it reads only the columns of `keys`.

    Raises DataError if the file cannot be read, or has none of these columns.
    """
    number = 0
    is_parquet = kind_of(path) == "parquet"
    kind = "Parquet" if is_parquet else "Arrow"
    try:
        with _open_parquet(path) if is_parquet else _open_arrow(path) as (names, batches):
            columns = _columns_among(names, keys, path, config_key)
            for batch in batches(columns):
                for row in rows_of_table(batch):
                    number += 1
                    yield number, number - 1, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{config_key}: {str(path)!r} is no readable {kind} file: {error}") from error


def rows_of_table(table: Any) -> list[Row]:
    """Returns the rows of a table or batch, with values as JSON would have them.

    A short float becomes the number with the fewest digits that rounds to it: 1.1, not 1.100000023841858. A map with
    texts as keys becomes an object. A struct becomes a Struct.
    """
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        reader, values = _reader_of(field.type), column.to_pylist()
        columns.append(values if reader is None else [None if value is None else reader(value) for value in values])
    each_row = zip(range(table.num_rows), *columns, strict=True)
    return [dict(zip(table.schema.names, values, strict=True)) for _, *values in each_row]


Reader = Callable[[Any], Any]


def _reader_of(kind: Any) -> Reader | None:
    """Returns a function from pyarrow's values (other than null) to JSON's. None if both are the same."""
    if types.is_float16(kind) or types.is_float32(kind):
        short = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: _widened(float(value), short)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _reader_of(kind.value_type)
    if types.is_struct(kind):
        fields = {field.name: _or_null(_reader_of(field.type)) for field in kind}
        return lambda value: Struct((name, fields[name](part)) for name, part in value.items())
    if types.is_map(kind):
        part_of = _or_null(_reader_of(kind.item_type))
        if (
            types.is_string(kind.key_type)
            or types.is_large_string(kind.key_type)
            or types.is_string_view(kind.key_type)
        ):
            return lambda value: {key: part_of(part) for key, part in value}
        return lambda value: [(key, part_of(part)) for key, part in value]
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _reader_of(kind.storage_type)
    if hasattr(kind, "value_type") and (item := _reader_of(kind.value_type)):  # every kind of list
        return lambda value: [None if part is None else item(part) for part in value]
    return None


def _widened(value: float, short: type[np.floating[Any]]) -> float:
    """Returns the number with the fewest digits that rounds to a short float. Whole numbers stay unchanged."""
    return value if value.is_integer() and abs(value) < EXACT else float(str(short(value)))


def _or_null(reader: Reader | None) -> Reader:
    return lambda value: value if value is None or reader is None else reader(value)


def column_names(path: Path) -> list[str]:
    """Returns the columns of a readable file."""
    with _open_parquet(path) if kind_of(path) == "parquet" else _open_arrow(path) as (names, _):
        return list(names)


def _columns_among(names: list[str], keys: Keys, path: Path, config_key: str) -> list[str]:
    if keys is None:
        return names
    columns = [name for name in names if any(is_column_of(name, key) for key in keys)]
    needed = keys - keys.optional if isinstance(keys, KeysOfRows) else keys
    if not any(is_column_of(name, key) for name in columns for key in needed):
        raise DataError(
            f"{config_key}: {str(path)!r} has none of the columns {', '.join(sorted(needed))}; "
            f"its columns are {', '.join(names)}"
        )
    return columns


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        num_rows = _rows_at_a_time(sum(group.total_byte_size for group in groups), file.metadata.num_rows)
        yield (
            file.schema_arrow.names,
            lambda columns: _in_slices(file.iter_batches(num_rows, columns=columns), columns),
        )


def _rows_at_a_time(num_bytes: int, num_rows: int) -> int:
    """Returns the size of batches of a table."""
    return min(BATCH_ROWS, max(1, BATCH_BYTES * num_rows // max(num_bytes, 1)))


@contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    """Opens either Arrow format: a file with a list of its batches at the end, or a stream as written by `datasets`."""
    with pyarrow.memory_map(str(path)) as memory:
        try:
            file = ipc.open_file(memory)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            memory.seek(0)
            file = batches = ipc.open_stream(memory)
        yield file.schema.names, lambda columns: _in_slices(batches, columns)


def _in_slices(batches: Iterator[Any], columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        chosen = batch.select(columns)
        num_rows = _rows_at_a_time(chosen.nbytes, chosen.num_rows)
        for first in range(0, batch.num_rows, num_rows):
            yield chosen.slice(first, num_rows)


# The files of a folder with the rows of a split. The folder is a data set saved by `datasets`, a copy of a hub
# repository, or a plain folder.

NOT_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SPLIT_WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")


def files_of_folder(folder: Path, config_key: str, subset: str | None, split: str | None) -> list[Path]:
    """Returns the files in their order. `config_key` ends in ".path", next to `.split` and `.subset`.

    Raises DataError if there are no files. Also raises it if there are several splits or subsets and the config names
    none.
    """
    asked = _Asked(folder, config_key.removesuffix(".path"), subset, split)
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json", asked).get("splits", [])
        return _saved_files(folder / asked.choose_split(splits), asked)
    if (folder / "state.json").is_file():
        return _saved_files(folder, asked)
    files = _described_files(folder, asked)
    if files is None:
        files = _named_files(folder, asked)
    if not files:
        raise DataError(f"{config_key}: the folder {str(folder)!r} has no file of rows{asked}")
    return files


class _Asked:
    """The split and subset to take from a folder, with their config keys."""

    def __init__(self, folder: Path, section: str, subset: str | None, split: str | None) -> None:
        self.folder, self.section, self.subset, self.split = folder, section, subset, split

    def __str__(self) -> str:
        asked = (f"{kind} {name!r}" for kind, name in (("subset", self.subset), ("split", self.split)) if name)
        return "".join(f" for the {text}" for text in asked)

    def choose_split(self, splits: Sequence[str]) -> str:
        return self._choose("split", self.split, splits)

    def choose_subset(self, subsets: Sequence[str]) -> str:
        return self._choose("subset", self.subset, subsets)

    def _choose(self, kind: str, asked: str | None, present: Sequence[str]) -> str:
        if asked is None and len(present) == 1:
            return present[0]
        if asked is None or asked not in present:
            raise DataError(
                f"{self.section}.{kind}: got {'nothing' if asked is None else repr(asked)}; expected one of those in "
                f"{str(self.folder)!r}: {one_of(asked, present).removeprefix('one of ') or 'none'}"
            )
        return asked


def _read_json(path: Path, asked: _Asked) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{asked.section}.path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{asked.section}.path: {path} has {value!r:.80}; expected a JSON object")
    return value


def _saved_files(folder: Path, asked: _Asked) -> list[Path]:
    """Returns the files of `Dataset.save_to_disk`."""
    state = _read_json(folder / "state.json", asked)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{asked.section}.path: {str(folder)!r} has an index of rows beside its table, as saved by old versions "
            "of `datasets`. Save it again (flatten_indices, then save_to_disk)"
        )
    try:
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{asked.section}.path: {folder / 'state.json'} names no data files") from error


def _described_files(folder: Path, asked: _Asked) -> list[Path] | None:
    """Returns the files described at the head of the folder's README.md, as on the hub. None without a description."""
    subsets = _described_subsets(folder / "README.md")
    if not subsets:
        return None
    chosen = subsets.get("default") if asked.subset is None else None
    patterns = chosen or subsets[asked.choose_subset([*subsets])]
    split = asked.choose_split([*patterns])
    return _rows_among(path for pattern in patterns[split] for path in sorted(folder.glob(pattern)))


def _described_subsets(readme: Path) -> dict[str, dict[str, list[str]]]:
    """Returns subset -> split -> patterns of paths. Empty if there is no file, or if its head has another form."""
    if not readme.is_file():
        return {}
    head = re.match(r"---\s*\n(.*?)\n---\s*\n", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        described = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    configs = described.get("configs") if isinstance(described, dict) else None
    found = {}
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and config.get("data_files"):
            name = "default" if config.get("default") is True else str(config.get("config_name", "default"))
            found[name] = _patterns_by_split(config["data_files"])
    return found


def _patterns_by_split(data_files: Any) -> dict[str, list[str]]:
    if isinstance(data_files, str):
        return {"train": [data_files]}
    patterns: dict[str, list[str]] = {}
    for entry in data_files:
        split, paths = (entry.get("split", "train"), entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(str(split), []).extend([paths] if isinstance(paths, str) else paths)
    return patterns


def _named_files(folder: Path, asked: _Asked) -> list[Path]:
    """Returns every file of rows with the words of the split and the subset in its path."""
    files = _rows_among(sorted(folder.rglob("*")))
    words = {path: _words(path.relative_to(folder)) for path in files}
    if asked.subset is not None:
        files = [path for path in files if asked.subset in path.relative_to(folder).parts[:-1]]
    if asked.split is not None:
        return [path for path in files if asked.split in words[path]]
    splits = {word for path in files for word in words[path] if word in SPLIT_WORDS}
    if len(splits) > 1:
        asked.choose_split(sorted(splits))
    return files


def _words(path: Path) -> set[str]:
    return {*re.split(r"[^A-Za-z0-9]+", path.as_posix()), *path.parts[:-1], path.name.split(".")[0]}


def _rows_among(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.is_file() and path.name not in NOT_ROWS and has_rows(path)]


# A path of the config: files in their order, and a range of their rows.

ROWS = re.compile(r"(?P<path>.+)@\[(?P<first>\d*):(?P<end>\d*)\]")


@dataclass(frozen=True)
class Location:
    """`path` with the rows from `first` up to `end` (exclusive) of all its files together."""

    path: str
    first: int = 0
    end: int | None = None

    @classmethod
    def of(cls, text: str, config_key: str) -> "Location":
        """Parses "path" or "path@[first:end]". Raises DataError for other text in such brackets."""
        found = ROWS.fullmatch(text)
        if found is None:
            if re.search(r"@\[[^]]*\]$", text):
                raise DataError(
                    f"{config_key}: got {text!r}; expected rows as @[first:end], such as file.jsonl@[0:1000], with "
                    "whole numbers, either of which may be left out"
                )
            return cls(text)
        first, end = found["first"], found["end"]
        return cls(found["path"], int(first or 0), int(end) if end else None)

    def files(self, config_key: str, subset: str | None, split: str | None) -> Iterator[Path]:
        """Yields a file itself, the files of a folder, or the files matching a pattern, in the order of their names.

        Raises DataError if there is none.
        """
        path = Path(self.path)
        if path.is_dir():
            yield from files_of_folder(path, config_key, subset, split)
        elif path.is_file():
            yield path
        elif glob.has_magic(self.path):
            found = sorted(Path(match) for match in glob.glob(self.path, recursive=True))
            if not found:
                raise DataError(f"{config_key}: no file fits {self.path!r} (relative paths start at {Path.cwd()})")
            for match in found:
                yield from files_of_folder(match, config_key, subset, split) if match.is_dir() else (match,)
        else:
            raise DataError(f"{config_key}: there is no file {self.path!r} (relative paths start at {Path.cwd()})")


# Files with rows, and the rows that a source takes from them.


@dataclass(frozen=True)
class RowFile:
    path: Path
    kind: Kind
    is_list: bool
    """Whether the file is one JSON list. Other JSON files have a line per row."""
    num_bytes: int
    mtime_ns: int
    """Time of the last write. Size and time were found before the rows were read."""

    @classmethod
    def of(cls, path: Path, config_key: str) -> "RowFile":
        """Raises DataError if the file is of an unknown kind or cannot be opened."""
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
        """The beginning of a row's origin. The row's number follows."""
        if self.kind == "json":
            return f"{self.path} item " if self.is_list else f"{self.path}:"
        return f"{self.path} row "

    @property
    def has_plain_lines(self) -> bool:
        """Whether the file can be read from the first byte of any row on."""
        return self.kind == "json" and not self.is_list and not is_compressed(self.path)

    def rows(self, keys: Keys, config_key: str) -> PlacedRows:
        """Returns all rows. Raises DataError if the file cannot be read."""
        if self.kind != "json":
            return read_table(self.path, keys, config_key)
        return read_list(self.path, config_key) if self.is_list else read_lines(self.path, config_key)


@dataclass(frozen=True)
class FileSlice:
    """The rows from `first` up to `end` (exclusive) of several files together."""

    files: tuple[RowFile, ...]
    first: int = 0
    end: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.end is None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole files."""
        return sum(file.num_bytes for file in self.files)

    def rows(self, keys: Keys, config_key: str) -> "Iterator[FileRow]":
        """Returns the rows. Raises DataError if a file cannot be read."""
        rows = ((file, *row) for file in self.files for row in file.rows(keys, config_key))
        return islice(rows, self.first, self.end)


FileRow = tuple[RowFile, int, int, Row | BadRow]
"""(its file, and the fields of PlacedRows)"""


def slice_of(path: str, config_key: str, subset: str | None, split: str | None) -> FileSlice:
    """Returns the files and rows of a path in the config. Raises DataError if they do not exist."""
    location = Location.of(path, config_key)
    files = tuple(RowFile.of(file, config_key) for file in location.files(config_key, subset, split))
    return FileSlice(files, location.first, location.end)


def slices_of(source: schema.PromptSource, config_key: str) -> list[FileSlice]:
    """Returns a slice for each path of `source`. `config_key` is the paths' setting. Raises DataError like slice_of."""
    paths = (source.path,) if isinstance(source.path, str) else source.path
    return [slice_of(path, config_key, source.subset, source.split) for path in paths]


def rows_of(slices: Sequence[FileSlice], keys: Keys, config_key: str) -> Iterator[FileRow]:
    """Returns the rows of all slices, one after another. Raises DataError if a file cannot be read."""
    return chain.from_iterable(one.rows(keys, config_key) for one in slices)


# Rows of files, one at a time, each with its origin and perhaps its problem.


def read_source(source: schema.PromptSource, keys: Keys, config_key: str) -> Rows:
    """Yields (origin, row or its problem) for all rows of a prompt source, one path after another in the order of the
    config.

    The origin is the row's file and number. `keys` are the keys to look up, None for all. `config_key` is the config
    key of `source`, for messages. Raises DataError as `read_rows` does.
    """
    paths = (source.path,) if isinstance(source.path, str) else source.path
    return read_rows(paths, keys, config_key, subset=source.subset, split=source.split)


def read_rows(
    paths: str | Path | Sequence[str | Path],
    keys: Keys,
    config_key: str,
    *,
    subset: str | None = None,
    split: str | None = None,
) -> Rows:
    """Yields every row of files, folders and patterns, or of `path@[first:end]`. Blank lines of JSONL are no rows.

    `keys` are the keys that the caller will look up, None for all. Of Parquet files only these columns are read.
    `config_key` names the setting of the paths. `subset` and `split` select from folders with several. Raises DataError
    if a file is missing, of an unknown kind or unreadable.
    """
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        rows = slice_of(str(path), config_key, subset, split).rows(keys, config_key)
        yield from ((f"{file.prefix}{number}", values) for file, number, _, values in rows)
