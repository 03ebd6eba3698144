"""Writes one rank's files of a checkpoint. It can write from a thread while training continues."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from rltrain.checkpoint.run_files import Contents, FileRecord, copy_files, write_files
from rltrain.runtime.machine import JobThread

NICENESS = 10
"""Niceness of the writing thread. It uses only processors left free by training."""


@dataclass(frozen=True)
class Written:
    """The result for one rank's files: the written files, the seconds, and the problem if not all were written."""

    files: Mapping[str, FileRecord]
    seconds: float = 0.0
    problem: str | None = None


Report = Callable[[Written], None]
"""Called from the writing thread once all files are durable, or after a failure."""


class Target(NamedTuple):
    """A folder to write to, and the function to call afterwards."""

    folder: Path
    report: Report


class FilesWriter:
    """A writer of one save at a time.

    The first of several targets is written from the given memory, and the others from its files. So a slow disk delays
    neither the next save nor the release of the memory. The files stay open for this, because they may be removed
    meanwhile.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread: JobThread | None = None
        self._copier: JobThread | None = None

    def start(self, files: Mapping[str, Contents], *targets: Target) -> None:
        """Writes `files` below the folder of each target, one after the other. They must not change before `release`
        has returned. Waits until the previous save does not need its files any more. With several targets, also waits
        for its copies."""
        if len(targets) > 1:
            self.join()
        self.release()
        if not self.asynchronous:
            for target in targets:
                target.report(_written(files, target.folder))
            return
        # Not a daemon, so a save is completed even if the run ends right after its start.
        self._thread = JobThread(target=self._write, args=(files, targets), name="checkpoint writer")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return any(thread is not None and thread.is_alive() for thread in (self._thread, self._copier))

    def release(self) -> None:
        """Waits until the files given to `start` are not read any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def join(self) -> None:
        """Waits until all targets are written."""
        self.release()
        if self._copier is not None:
            self._copier.join()
            self._copier = None

    def _write(self, files: Mapping[str, Contents], targets: Sequence[Target]) -> None:
        _leave_processors()
        first, *others = targets
        written = _written(files, first.folder)
        opened = _opened(first.folder, written) if others else None
        first.report(written)
        if opened is None:
            for target in others:
                target.report(_written(files, target.folder))
            return
        self._copier = JobThread(target=_copy, args=(opened, written.files, others), name="checkpoint copier")
        self._copier.start()


def _leave_processors() -> None:
    with suppress(OSError):  # a system may forbid it, or support it only for processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _opened(folder: Path, written: Written) -> dict[str, FileIO] | None:
    """Opens the written files before any report, because they may be removed after it. Returns None if they cannot be
    read."""
    if written.problem is not None:
        return None
    with ExitStack() as stack:
        try:
            found = {name: stack.enter_context((folder / name).open("rb", buffering=0)) for name in written.files}
        except OSError:
            return None
        stack.pop_all()
    return found


def _copy(opened: Mapping[str, FileIO], expected: Mapping[str, FileRecord], targets: Sequence[Target]) -> None:
    _leave_processors()
    with ExitStack() as stack:
        for file in opened.values():
            stack.enter_context(file)
        for target in targets:
            target.report(_reported(partial(copy_files, target.folder, opened, expected)))


def _written(files: Mapping[str, Contents], folder: Path) -> Written:
    return _reported(partial(write_files, folder, files))


def _reported(write: Callable[[], Mapping[str, FileRecord]]) -> Written:
    begin = time.perf_counter()
    try:
        records = write()
    except OSError as error:
        return Written({}, problem=error.strerror or str(error))
    except Exception as error:  # the rank that completes the checkpoint waits for this report
        return Written({}, problem=f"{type(error).__name__}: {error}")
    return Written(records, time.perf_counter() - begin)
