"""Columns of a prompt file other than prompt and label, for reward functions and other users."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.data.image_parts import with_references
from rltrain.data.images import is_given, source_of
from rltrain.data.prompts import PromptDataset, PromptRow
from rltrain.data.row_index import Chained, ComputedSequence, IndexedRows
from rltrain.data.rows import BadRow, Keys, Row, is_column_of, look_up, read_source
from rltrain.errors import DataError, one_of


class RowColumns:
    """The wanted columns of a dataset's rows. Each row is held as JSON text, which takes a fraction of the memory of
    objects."""

    def __init__(self, rows: Sequence[bytes], label_keys: Sequence[tuple[int, str | None]]) -> None:
        """`label_keys` has (first row, key of the label) of each source. The key is None for labels that
        were not read."""
        self._rows = rows
        self._label_keys = label_keys

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the columns of a row. It may lack columns that other rows have."""
        columns: dict[str, Any] = json.loads(self._rows[index])
        return columns

    def label_value(self, index: int, columns: Row) -> Any:
        """Returns the label of row `index` as written in the file. `columns` are the columns of this row."""
        key = next(key for first, key in reversed(self._label_keys) if first <= index)
        return None if key is None else look_up(columns, key)


def read_columns(
    dataset: PromptDataset,
    file: schema.PromptFile,
    *,
    config_key: str,
    required: Mapping[str, str],
    optional: Collection[str] = (),
    every: bool = False,
    label: bool = False,
) -> RowColumns:
    """Returns the wanted columns of `dataset`'s rows. The rows were read from `file`, given by `config_key`.

    `required` maps each required column to its user, for messages. `optional` columns are read if the file has them.
    `every` reads all columns. Images come as paths and data URLs. Raises DataError for a required column
    missing in all rows, and for a value that JSON cannot hold.
    """
    seen, parts, label_keys = set[str](), list[Sequence[bytes]](), list[tuple[int, str | None]]()
    for number, (source, part) in enumerate(zip(file.parts(), dataset.sources, strict=True)):
        label_key = source.label_key if label else None
        wanted = _Wanted(source, {*required, *optional}, label_key, every, dataset.encoder.images is not None)
        key = f"{config_key}.sources.{number}.path" if file.sources else f"{config_key}.path"
        label_keys.append((part.first, wanted.label_key))
        rows = dataset.rows_of_sources[number]
        parts.append(_indexed(wanted, rows, seen) if isinstance(rows, IndexedRows) else _held(wanted, rows, key, seen))
    for name in required:
        if name not in seen:
            raise DataError(
                f"{config_key}.path: {_paths(file)} has no column {name!r}, which {required[name]} takes; its columns "
                f"are {', '.join(_columns_of(file, config_key))}"
            )
    return RowColumns(Chained(parts), label_keys)


def teachers_of_rows(dataset: PromptDataset, train: schema.PromptFile, column: str, names: Sequence[str]) -> list[int]:
    """Returns the number in `names` of each row's teacher. Rows of data.train name it in `column`.

    Raises DataError if a row names none of them.
    """
    wanted = {column: "role teacher (teacher.column)"}
    rows = read_columns(dataset, train, config_key="data.train", required=wanted)
    numbers = {name: number for number, name in enumerate(names)}
    found = []
    for row in range(len(rows)):
        name = rows[row].get(column)
        if not isinstance(name, str) or name not in numbers:
            raise DataError(
                f"{dataset[row].origin}: {column!r} is {name!r}; expected {one_of(name, names)} (teacher.path)"
            )
        found.append(numbers[name])
    return found


@dataclass(frozen=True)
class _Wanted:
    """The wanted columns of one source."""

    source: schema.PromptSource
    names: Collection[str]
    label_key: str | None
    every: bool
    sees: bool
    """Whether the run sees images."""

    @property
    def keys(self) -> Keys:
        of_label = () if self.label_key is None else (self.label_key,)
        return None if self.every else {self.source.prompt_key, *self.names, *of_label}

    def has(self, name: str) -> bool:
        is_label = self.label_key is not None and is_column_of(name, self.label_key)
        return self.every or name in self.names or is_label

    def as_json(self, values: Row, origin: str) -> bytes:
        """Returns the wanted columns of a row as JSON, with references in the place of images.

        Raises DataError for a value that JSON cannot hold, and for an image of another form than `source_of` takes.
        """
        columns = {name: value for name, value in values.items() if self.has(name)}
        if not self.sees:
            return _as_json(columns, origin)
        try:
            if (name := self.source.images_key) in columns:
                given = columns[name] if isinstance(columns[name], list | tuple) else [columns[name]]
                sources = [source_of(one, Path(origin).parent) for one in given if is_given(one)]
                columns[name] = [source.reference for source in sources]
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None
        return _as_json({name: with_references(value) for name, value in columns.items()}, origin)


class _IndexedColumns(ComputedSequence[bytes]):
    """The columns of rows that are read by an index."""

    def __init__(self, wanted: _Wanted, rows: IndexedRows) -> None:
        self._wanted, self._rows = wanted, rows

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> bytes:
        """Returns a row's columns as JSON. Raises DataError for a value that JSON cannot hold, and like IndexedRows."""
        origin, values = self._rows.values(index, self._wanted.keys)
        return self._wanted.as_json(values, origin)


def _indexed(wanted: _Wanted, rows: IndexedRows, seen: set[str]) -> Sequence[bytes]:
    """Returns the columns of indexed rows, and adds their names to `seen`.

    The first row is read at once. So a column is refused now if JSON cannot hold its values.
    """
    seen.update(name for name in rows.row_index.summary.columns if wanted.has(name))
    columns = _IndexedColumns(wanted, rows)
    columns[0]
    return columns


def _held(wanted: _Wanted, rows: Sequence[PromptRow], key: str, seen: set[str]) -> Sequence[bytes]:
    found = [*_of_source(wanted, (row.origin for row in rows), key, seen)]
    if len(found) != len(rows):
        raise DataError(f"{key}: {wanted.source.path!r} has changed since its prompts were read")
    return found


def _of_source(wanted: _Wanted, origins: Iterator[str], config_key: str, seen: set[str]) -> Iterator[bytes]:
    """Yields the wanted columns of the rows at `origins`. Adds their names to `seen`."""
    expected = next(origins, None)
    for origin, values in read_source(wanted.source, wanted.keys, config_key):
        if origin != expected or isinstance(values, BadRow):
            continue
        seen.update(name for name in values if wanted.has(name))
        yield wanted.as_json(values, origin)
        expected = next(origins, None)
        if expected is None:
            break


def _paths(file: schema.PromptFile) -> str:
    return repr(file.path) if file.path is not None else ", ".join(repr(source.path) for source in file.sources)


def _as_json(columns: Mapping[str, Any], origin: str) -> bytes:
    try:
        return json.dumps(columns, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    except (TypeError, ValueError):
        name, value = next((name, value) for name, value in columns.items() if not _is_writable(value))
        raise DataError(
            f"{origin}: the row has {value!r:.80} ({type(value).__name__}) under {name!r}, which JSON cannot hold. "
            "Reward functions get rows as JSON: texts, numbers, truth values, and lists and objects of these"
        ) from None


def _is_writable(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _columns_of(file: schema.PromptFile, config_key: str) -> list[str]:
    """Returns the columns of the first row."""
    rows = (values for _, values in read_source(file.parts()[0], None, f"{config_key}.path"))
    return list(next((values for values in rows if not isinstance(values, BadRow)), {}))
