"""Rows of files, one at a time, each with where it stands and whether it could be read."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rltrain.config import schema
from rltrain.data.file_kinds import KNOWN, kind_of
from rltrain.data.json_lines import read_json
from rltrain.data.locations import Location
from rltrain.data.rows import BadRow as BadRow
from rltrain.data.rows import Keys, Rows
from rltrain.data.rows import Row as Row
from rltrain.data.rows import is_column_of as is_column_of
from rltrain.data.rows import look_up as look_up
from rltrain.data.tables import read_table
from rltrain.errors import DataError


def read_source(source: schema.PromptSource, keys: Keys, config_key: str) -> Rows:
    """Every row of the files that `source` names, one after the other; as `read_rows`."""
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
    """Every row of files, folders and patterns, `path@[first:end]` of some of theirs; blank lines of JSONL are none.

    `keys` are the ones the caller will look up, None for all: of Parquet, only their columns are read. `config_key`
    names the setting the paths came from, `subset` and `split` say what is wanted of folders that have several. Raises
    DataError for a file that is missing, of an unknown kind or unreadable.
    """
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        location = Location.of(str(path), config_key)
        files = location.files(config_key, subset, split)
        rows = (row for file in files for row in _read_file(file, keys, config_key))
        yield from islice(rows, location.first, location.end)


def _read_file(path: Path, keys: Keys, config_key: str) -> Rows:
    kind = kind_of(path)
    if kind is None:
        raise DataError(f"{config_key}: {str(path)!r} is of an unknown kind; expected a file that ends in {KNOWN}")
    return read_json(path, config_key) if kind == "json" else read_table(path, keys, config_key)
