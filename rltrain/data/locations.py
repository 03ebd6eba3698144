"""What a path of the config stands for: files in their order, and the rows of them that it names."""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rltrain.data.dataset_folders import files_of_folder
from rltrain.errors import DataError

ROWS = re.compile(r"(?P<path>.+)@\[(?P<first>\d*):(?P<end>\d*)\]")


@dataclass(frozen=True)
class Location:
    """`path` with the rows `first` up to `end` of all its files together."""

    path: str
    first: int = 0
    end: int | None = None

    @classmethod
    def of(cls, text: str, config_key: str) -> "Location":
        """Of "path" or "path@[first:end]". DataError for other text in such brackets."""
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
        """A file itself, those of a folder, or those that a pattern fits, in the order of their names. DataError where
        there is none."""
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
