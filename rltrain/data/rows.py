"""One row of a file, whatever the file's kind."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rltrain.runtime.json_text import lone_surrogate

Row = Mapping[str, Any]


class Struct(dict[str, Any]):
    """An object of a column of Parquet or Arrow: it has a null for every field that another row's object has."""


class BadRow(Exception):  # noqa: N818 - a finding about data, which on_bad_row may turn into an error
    """What is wrong with one row, and by which `reason` it is counted."""

    def __init__(self, problem: object, reason: str = "unusable value") -> None:
        super().__init__(problem)
        self.reason = reason


Rows = Iterator[tuple[str, Row | BadRow]]
"""(origin, row or what is wrong with it): the origin is file and place, for messages."""

PlacedRows = Iterator[tuple[int, int, Row | BadRow]]
"""(number in its file from 1, where it stands, row or what is wrong with it): of lines the byte that each begins at,
else the number less 1."""

Keys = Collection[str] | None
"""What the caller will look up; None: anything."""


def look_up(row: Row, key: str) -> Any:
    """Returns row[key]; a key with dots that is no key itself leads into nested objects.

    Raises BadRow where it is missing, and where it has a text that no tokenizer can read.
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
            raise BadRow(f"has no key {key!r}; its keys are {keys}", reason=f"no key {key!r}")
        value = value[name]
    return value


def is_column_of(column: str, key: str) -> bool:
    """Whether `look_up` finds `key` in this column."""
    return key == column or key.startswith(f"{column}.")
