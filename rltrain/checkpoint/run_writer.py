"""Writes one rank's files of a checkpoint, from a thread where training is to go on meanwhile."""

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
"""Of the writing thread: it takes what training leaves of the processors."""


@dataclass(frozen=True)
class Written:
    """Of one rank's files: what was written, in how many seconds, and why not all of it."""

    files: Mapping[str, FileRecord]
    seconds: float = 0.0
    problem: str | None = None


Report = Callable[[Written], None]
"""Called once all of it is durable or has failed, from the writing thread."""


class Target(NamedTuple):
    """Where to write to, and whom to tell of it."""

    folder: Path
    report: Report


class FilesWriter:
    """One save at a time.

    Of several targets the first is written from what is given, and the others from its files, so that a slow disk holds
    up neither a save after this one nor the memory that this one is written from. They stay open for that: they may be
    removed meanwhile.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread: JobThread | None = None
        self._copier: JobThread | None = None

    def start(self, files: Mapping[str, Contents], *targets: Target) -> None:
        """Write `files` below the folder of each target, one after the other. Nobody may change them before `release`
        has returned. Waits for the save before, where that has to be copied on, for all of it."""
        if len(targets) > 1:
            self.join()
        self.release()
        if not self.asynchronous:
            for target in targets:
                target.report(_written(files, target.folder))
            return
        # Not a daemon: what was begun is written even where the run ends right after it.
        self._thread = JobThread(target=self._write, args=(files, targets), name="checkpoint writer")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return any(thread is not None and thread.is_alive() for thread in (self._thread, self._copier))

    def release(self) -> None:
        """Wait until what was given to `start` is not read any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def join(self) -> None:
        """Wait until all targets have what was started."""
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
    with suppress(OSError):  # a system may forbid it, or know it for processes only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _opened(folder: Path, written: Written) -> dict[str, FileIO] | None:
    """What was written, before anybody is told of it, who may remove it then. None where it cannot be read."""
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
    except Exception as error:  # whoever completes the checkpoint waits for a word, and ends the job with this one
        return Written({}, problem=f"{type(error).__name__}: {error}")
    return Written(records, time.perf_counter() - begin)
