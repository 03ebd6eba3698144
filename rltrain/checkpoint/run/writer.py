"""Writes one rank's files of a checkpoint, from a thread where training is to go on meanwhile."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rltrain.checkpoint.run.files import Contents, FileRecord, write_files
from rltrain.system.threads import JobThread

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
    """One save at a time: `start` waits for the one before it."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread: JobThread | None = None

    def start(self, files: Mapping[str, Contents], *targets: Target) -> None:
        """Write `files`, which nobody may change any more, below the folder of each target, one after the other."""
        self.join()
        if not self.asynchronous:
            _write(files, targets)
            return
        # Not a daemon: what was begun is written even where the run ends right after it.
        self._thread = JobThread(target=_write_aside, args=(files, targets), name="checkpoint writer")
        self._thread.start()

    def join(self) -> None:
        """Wait until the disk has what was started."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write_aside(files: Mapping[str, Contents], targets: Sequence[Target]) -> None:
    with suppress(OSError):  # a system may forbid it, or know it for processes only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    _write(files, targets)


def _write(files: Mapping[str, Contents], targets: Sequence[Target]) -> None:
    for folder, report in targets:
        begin = time.perf_counter()
        try:
            records = write_files(folder, files)
        except OSError as error:
            report(Written({}, problem=error.strerror or str(error)))
        except Exception as error:  # whoever completes the checkpoint waits for a word, and ends the job with this one
            report(Written({}, problem=f"{type(error).__name__}: {error}"))
        else:
            report(Written(records, time.perf_counter() - begin))
