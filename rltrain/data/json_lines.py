"""Rows of JSON files, one object a line or one list of objects, compressed or not."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow

from rltrain.data.rows import BadRow, PlacedRows, Row
from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json, too_many_digits

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
NO_OBJECT = "no JSON object"
"""The reason by which such rows are counted."""
COUNTED_BYTES = 2**20


def _open_zstd(path: Path) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


def is_list(path: Path, config_key: str) -> bool:
    """Whether the file is one JSON list, which only a name that ends in .json announces. As read_json."""
    if _inner_suffix(path) != ".json":
        return False
    with _opened(path, config_key) as file:
        return bool(file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))


def read_lines(path: Path, config_key: str, begin: int = 0, end: int | None = None) -> PlacedRows:
    """Of the lines that begin at the bytes `begin` up to `end` (None: all), numbered from 1; blank ones are no rows.
    Raises DataError for a file that cannot be read or unpacked."""
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
    """Raises DataError for a file that cannot be read or unpacked, or is no list."""
    with _opened(path, config_key) as file:
        try:
            items = parse_json(file.read().decode("utf-8-sig"), parse_int=_whole_number)
        except ValueError as error:
            raise DataError(f"{config_key}: {str(path)!r} begins as a JSON list and is none: {error}") from error
    for number, item in enumerate(items, start=1):
        yield number, number - 1, _row_of(item)


class _TooLong:
    """Stands for a whole number that has too many digits, so that it spoils its own item alone."""


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
    """Those that begin at the bytes `begin` up to `end`, at most its size, of a file that is not compressed."""
    count, left = int(begin == 0 < end), end - max(begin, 1)
    with path.open("rb", buffering=0) as file:
        file.seek(max(begin - 1, 0))
        while left > 0 and (block := file.read(min(left, COUNTED_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def parse_line(line: bytes) -> Row | BadRow:
    """What a line says that is not blank."""
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
