"""The folder that a conversion makes: beside its place until it is complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rltrain.checkpoint.conversion.processes import Processes
from rltrain.checkpoint.run.files import flush_folder
from rltrain.errors import CheckpointError


@contextmanager
def output_folder(path: Path, processes: Processes) -> Iterator[Path]:
    """The hidden folder `.NAME.partial` beside `path`, which takes its place when the block has ended everywhere.

    After an error nothing is left of it; after a process was killed it may be, and the next conversion empties it.
    CheckpointError where `path` exists, another conversion fills it now, or the disk takes no more.
    Collective over: all processes.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists; expected a folder that is still to be made: move it away or name another (option --output)"
        )
    processes.meet()  # nobody makes the folder before all have looked
    partial = path.with_name(f".{path.name}.partial")
    with _told_where(path), _locked(partial) if processes.first else nullcontext():
        processes.meet()
        try:
            yield partial
            processes.meet()
            if processes.first:
                flush_folder(partial)
                partial.rename(path)
                flush_folder(path.parent)
        except BaseException:
            if processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        processes.meet()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """`folder`, new and empty, to this process alone: what is left of an interrupted conversion is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being filled by another conversion; wait for it or name another folder (option --output)"
            ) from None
        except OSError:  # a file system without locks
            pass
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _told_where(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be written: {problem} (option --output)") from None
