"""Rows of Parquet and Arrow files, batch by batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from rltrain.data.file_kinds import kind_of
from rltrain.data.rows import Keys, PlacedRows, is_column_of
from rltrain.errors import DataError

BATCH_ROWS = 4096


def read_table(path: Path, keys: Keys, config_key: str) -> PlacedRows:
    """Of Parquet files only the columns of `keys` are read. Raises DataError for a file that cannot be read, or that
    has none of them."""
    number = 0
    is_parquet = kind_of(path) == "parquet"
    kind = "Parquet" if is_parquet else "Arrow"
    try:
        with _open_parquet(path) if is_parquet else _open_arrow(path) as (names, batches):
            columns = _columns_among(names, keys, path, config_key)
            for batch in batches(columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, number - 1, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{config_key}: {str(path)!r} is no readable {kind} file: {error}") from error


def column_names(path: Path) -> list[str]:
    """Of a file that can be read."""
    with _open_parquet(path) if kind_of(path) == "parquet" else _open_arrow(path) as (names, _):
        return list(names)


def _columns_among(names: list[str], keys: Keys, path: Path, config_key: str) -> list[str]:
    if keys is None:
        return names
    columns = [name for name in names if any(is_column_of(name, key) for key in keys)]
    if not columns:
        raise DataError(
            f"{config_key}: {str(path)!r} has none of the columns {', '.join(sorted(keys))}; "
            f"its columns are {', '.join(names)}"
        )
    return columns


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        yield file.schema_arrow.names, lambda columns: file.iter_batches(BATCH_ROWS, columns=columns)


@contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    """Either form of Arrow's files: with a list of its batches at the end, or as a stream, as `datasets` writes."""
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
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield chosen.slice(first, BATCH_ROWS)
