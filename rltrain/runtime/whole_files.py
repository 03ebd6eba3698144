"""Files and folders that appear under their names only when they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[Any]:
    """Opens a binary file that replaces `path` when the block ends without an error.

    Readers of `path` find the old file or the whole new one. With `durable` this holds even if the machine fails.
    Raises OSError.
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
    """Replaces the file by one with `text`, like `written_whole`."""
    with written_whole(path) as file:
        file.write(text.encode())


def partial_of(path: Path) -> Path:
    """Returns the hidden path next to `path` at which the folder is built."""
    return path.with_name(f".{path.name}.partial")


def make_empty(folder: Path) -> None:
    """Creates an empty folder, without remains of an interrupted process. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def put_in_place(complete: Path, path: Path, *, replaces: bool = False) -> None:
    """Renames the folder `complete` to `path` in the same parent folder. Everything in it is durable when this returns.

    Raises OSError if the disk fails, or if `path` exists and `replaces` is not set.
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
    """Makes the contents of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
