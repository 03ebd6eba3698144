"""Writes one rank's files of a checkpoint, from a thread where training is to go on meanwhile."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rltrain.checkpoint.run.files import Contents, FileRecord, write_files
from rltrain.cluster.threads import JobThread

Report = Callable[[dict[str, FileRecord], str | None], None]
"""(what was written, why not all of it), called once all of it is durable or has failed, from the writing thread."""


class FilesWriter:
    """One save at a time: `start` waits for the one before it."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread: JobThread | None = None

    def start(self, folder: Path, files: Mapping[str, Contents], report: Report) -> None:
        """Write `files`, which nobody may change any more, below `folder`."""
        self.join()
        if not self.asynchronous:
            _write(folder, files, report)
            return
        # Not a daemon: what was begun is written even where the run ends right after it.
        self._thread = JobThread(target=_write, args=(folder, files, report), name="checkpoint writer")
        self._thread.start()

    def join(self) -> None:
        """Wait until the disk has what was started."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write(folder: Path, files: Mapping[str, Contents], report: Report) -> None:
    try:
        records = write_files(folder, files)
    except OSError as error:
        report({}, error.strerror or str(error))
    except Exception as error:  # whoever completes the checkpoint waits for a word, and ends the job with this one
        report({}, f"{type(error).__name__}: {error}")
    else:
        report(records, None)
