"""Rows of JSON files, one object a line or one list of objects, compressed or not."""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow

from rltrain.data.rows import BadRow, Row, Rows
from rltrain.errors import DataError

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
NO_OBJECT = "no JSON object"
"""The reason by which such rows are counted."""


def _open_zstd(path: Path) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def read_json(path: Path, config_key: str) -> Rows:
    """Blank lines are no rows. Raises DataError for a file that cannot be read or unpacked."""
    opener = OPENERS.get(path.suffix.lower())
    kind = Path(path.stem if opener else path.name).suffix.lower()
    try:
        with opener(path) if opener else path.open("rb") as lines:
            if kind == ".json" and lines.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                yield from _read_list(lines, path, config_key)
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line.rstrip())
    except BROKEN as error:
        raise DataError(f"{config_key}: {str(path)!r} cannot be read: {error}") from error


def _parse_line(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8: {error}", NO_OBJECT)
    except json.JSONDecodeError as error:
        return BadRow(f"is not JSON: {error.msg} at column {error.colno}", NO_OBJECT)
    except RecursionError:
        return BadRow("is nested too deeply", NO_OBJECT)
    if isinstance(row, dict):
        return row
    return BadRow(f"is a JSON {type(row).__name__}; expected one JSON object per line", NO_OBJECT)


def _read_list(file: BinaryIO, path: Path, config_key: str) -> Rows:
    try:
        items = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{config_key}: {str(path)!r} begins as a JSON list and is none: {error}") from error
    for number, item in enumerate(items, start=1):
        is_row = isinstance(item, dict)
        yield (
            f"{path} item {number}",
            item if is_row else BadRow(f"is a JSON {type(item).__name__}; expected an object", NO_OBJECT),
        )
