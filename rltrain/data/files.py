"""Rows of files, one at a time, each with where it stands and whether it could be read."""

from collections.abc import Sequence
from pathlib import Path

from rltrain.config import schema
from rltrain.data.row_files import slice_of
from rltrain.data.rows import BadRow as BadRow
from rltrain.data.rows import Keys, Rows
from rltrain.data.rows import Row as Row
from rltrain.data.rows import is_column_of as is_column_of
from rltrain.data.rows import look_up as look_up


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
        rows = slice_of(str(path), config_key, subset, split).rows(keys, config_key)
        yield from ((f"{file.prefix}{number}", values) for file, number, _, values in rows)
