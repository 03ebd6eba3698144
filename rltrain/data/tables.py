"""Rows of Parquet and Arrow files, batch by batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import ipc, parquet, types

from rltrain.data.file_kinds import kind_of
from rltrain.data.rows import Keys, PlacedRows, Row, Struct, is_column_of
from rltrain.errors import DataError

BATCH_ROWS = 4096
EXACT = 2.0**53
"""Python's floats have all whole numbers below it."""


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
                for row in rows_of(batch):
                    number += 1
                    yield number, number - 1, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{config_key}: {str(path)!r} is no readable {kind} file: {error}") from error


def rows_of(table: Any) -> list[Row]:
    """Returns the rows of a table or a batch, with values as JSON would have them.

    A short float becomes the number of the fewest digits that it stands for: 1.1, not 1.100000023841858. A map with
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
    """Returns what makes JSON's value of one of pyarrow's that is not null; None where both are the same."""
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
    """Returns the number of the fewest digits that a short float stands for; whole numbers are what they are."""
    return value if value.is_integer() and abs(value) < EXACT else float(str(short(value)))


def _or_null(reader: Reader | None) -> Reader:
    return lambda value: value if value is None or reader is None else reader(value)


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
