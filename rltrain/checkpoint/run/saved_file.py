"""A file of a run's checkpoint as its readers see it, who say what they are about to read of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Rows(NamedTuple):
    """Elements of a flat tensor: from `first` on, in each of `rows` that lie `stride` apart, `cols`."""

    tensor: str
    first: int
    rows: int
    cols: int
    stride: int


class SavedFile:
    """A safetensors file that is here as a whole. `path` is its place in the checkpoint's folder."""

    is_whole = True
    """Else nothing may be read but what was asked for by one of the methods."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def place(self) -> Path:
        """Where it is to be opened, after what is read of it was asked for. Its header may always be read."""
        return self.path

    def ask_for_tensor(self, name: str) -> None:
        """CheckpointError, as of all of these, where it cannot be had."""

    def ask_for_rows(self, rows: Sequence[Rows]) -> None:
        """Of several tensors."""

    def ask_for_all(self) -> None:
        """Of the file."""


AnyFile = Path | SavedFile
"""A path stands for a file that is whole."""


def saved_file(file: AnyFile) -> SavedFile:
    return SavedFile(file) if isinstance(file, Path) else file
