"""Folders on storage that servers see: the ranks of a role write one together, and all of it is there or nothing."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rltrain.errors import ConfigError, cannot_write
from rltrain.runtime.job_store import JobStore

T = TypeVar("T")

PARTIAL = ".rltrain_{}.partial"


class SharedFolders:
    """In `folder`, which `config_key` names; the first of `ranks` makes, names and removes them. What has a name that
    `patterns` allow is an earlier run's, and is removed at the start.

    `begin` and `complete` are collective over: `ranks`.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        rank: int,
        *,
        job_store: JobStore,
        key: str,
        config_key: str,
        patterns: Sequence[str],
    ) -> None:
        self.leads = rank == ranks[0]
        self._folder, self._ranks, self._rank = folder.absolute(), ranks, rank
        self._job_store, self._key, self._config_key, self._patterns = job_store, key, config_key, patterns
        self._number = 0
        if self.leads:
            self._clear()

    def begin(self) -> Path:
        """A new folder to write into, which nobody else sees."""
        self._number += 1
        partial, made = self._partial, f"{self._key}/{self._number}/made"
        if self.leads:
            self.writing(partial, lambda: _make(partial))
            self._forget(self._number - 2)
            self._job_store.put(made, True)
        self._job_store.get(made, waiting_for=f"the folder {partial}")
        return partial

    def complete(self, name: str, wrote: Any, finish: Callable[[Path, list[Any]], None]) -> tuple[Path, list[Any]]:
        """Where the folder lies once every rank has written its share, and what all `wrote`, JSON values in the order
        of ranks. `finish` is called on the first one before, with both."""
        key = f"{self._key}/{self._number}"
        path, partial = self._folder / name, self._partial
        self._job_store.put(f"{key}/written/{self._rank}", wrote)
        if self.leads:
            all_wrote = [
                self._job_store.get(f"{key}/written/{rank}", waiting_for=f"the weights that rank {rank} writes")
                for rank in self._ranks
            ]
            self.writing(path, lambda: _finish(partial, path, lambda: finish(partial, all_wrote)))
            self._job_store.put(f"{key}/complete", all_wrote)
        return path, self._job_store.get(f"{key}/complete", waiting_for=f"the folder {path}")

    def remove(self, paths: Sequence[Path]) -> None:
        """No server needs them any more."""
        for path in paths if self.leads else ():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        if self.leads:
            self._clear()

    def writing(self, path: Path, write: Callable[[], T]) -> T:
        """What `write` returns; ConfigError with the config key where `path` cannot be written."""
        try:
            return write()
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    @property
    def _partial(self) -> Path:
        return self._folder / PARTIAL.format(self._number)

    def _forget(self, update: int) -> None:
        """What ranks told each other in an update that all of them have left."""
        if update > 0:
            for told in ("made", "complete", *(f"written/{rank}" for rank in self._ranks)):
                self._job_store.forget(f"{self._key}/{update}/{told}")

    def _clear(self) -> None:
        """Remove what has such names, and the folder if nothing else is in it."""
        if not self._folder.exists():
            return
        if not self._folder.is_dir():
            raise ConfigError(f"{self._config_key}: {self._folder} is not a folder; expected one, or none yet")
        for pattern in (*self._patterns, PARTIAL):
            for path in self._folder.glob(pattern.format("*")):
                shutil.rmtree(path, ignore_errors=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def _make(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _finish(partial: Path, path: Path, finish: Callable[[], None]) -> None:
    finish()
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
