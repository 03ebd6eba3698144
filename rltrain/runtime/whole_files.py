"""Files and folders that appear under their names once they are complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[Any]:
    """A binary file that takes the place of an earlier one at once when the block ends without an error.

    Whoever reads `path` finds the old file or the new one; if `durable`, though the machine fails. OSError.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            yield file
        if durable:
            flush(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replaces the file by one that holds `text`, as `written_whole` does."""
    with written_whole(path) as file:
        file.write(text.encode())


def partial_of(path: Path) -> Path:
    """Returns the hidden place beside `path` in which the folder is made."""
    return path.with_name(f".{path.name}.partial")


def make_empty(folder: Path) -> None:
    """Makes the folder anew, without what an interrupted process has left there. OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def put_in_place(complete: Path, path: Path, *, replaces: bool = False) -> None:
    """Gives the folder `complete`, which lies beside `path`, that name. All of it is durable when this returns.

    OSError where the disk does not take it, and where there is such a folder already, unless it `replaces` that.
    """
    for made in (*complete.rglob("*"), complete):
        flush(made)
    previous = path.with_name(f".{path.name}.previous")
    if replaces and path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    complete.rename(path)
    flush(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def flush(path: Path) -> None:
    """Makes the contents of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
