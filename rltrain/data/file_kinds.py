"""Kinds of files with rows, told by how their names end."""

from pathlib import Path
from typing import Literal

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Behind one of JSON_SUFFIXES."""
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
KNOWN = (
    f"{', '.join((*JSON_SUFFIXES, *PARQUET_SUFFIXES, *ARROW_SUFFIXES))}, or JSON and {', '.join(COMPRESSED_SUFFIXES)}"
)

Kind = Literal["json", "parquet", "arrow"]


def kind_of(path: Path) -> Kind | None:
    """None: of an unknown kind."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        return "json" if Path(path.stem).suffix.lower() in JSON_SUFFIXES else None
    if suffix in JSON_SUFFIXES:
        return "json"
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    return "arrow" if suffix in ARROW_SUFFIXES else None


def has_rows(path: Path) -> bool:
    """Whether `path` is of a known kind, and not hidden."""
    return kind_of(path) is not None and not path.name.startswith(".")
