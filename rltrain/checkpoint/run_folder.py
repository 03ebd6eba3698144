"""The folder of a run's checkpoints. This module finds its checkpoints and completes new ones.

    <dir>/latest                  the name of the newest checkpoint, for users and other programs; not read here
    <dir>/step_0000010/           state after 10 training steps
        manifest.json             size and checksum of every other file
        run.json                  config, architectures and number of ranks of the run
        <role>/..., ranks/...     safetensors
    <dir>/earlier_1/              later checkpoints of a run resumed from an older one, in the same form

A checkpoint is written beside its final place. It is renamed when the files of all ranks are durable, and is then the
newest.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.checkpoint.run_files import (
    MANIFEST_FILE,
    RUN_FILE,
    WEIGHTS_SUFFIX,
    FileRecord,
    SavedFile,
    checksum,
)
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError
from rltrain.runtime.whole_files import flush, partial_of, put_in_place, write_whole

logger = logging.getLogger(__name__)

LATEST_FILE = "latest"
STEP_NAME = re.compile(r"step_(\d{7,})")


@dataclass(frozen=True)
class Resumed:
    """The checkpoint to resume a run from, after `step` training steps.

    If `continues`, its responses and its experience of later steps are used and not generated again. `data_from` is the
    step to use the first of the present training rows. `logs` has the bytes to keep of the logs of samples, on the
    job's leader. It includes the logs of vanished ranks. If `in_memory`, the folder is in the node's memory, and every
    node has one with some of the files. `elsewhere` makes the other files, by their names in the checkpoint.
    """

    folder: Path
    step: int
    continues: bool = True
    data_from: int = 0
    logs: Mapping[str, int] = field(default_factory=dict)
    in_memory: bool = False
    elsewhere: Mapping[str, Callable[[], SavedFile]] = field(default_factory=dict, compare=False, repr=False)

    def files(self, role: str) -> list[SavedFile]:
        """Returns the files saved by the ranks of a role, sorted by name. Their objects may hold memory."""
        here = [SavedFile(path) for path in (self.folder / role).glob(f"*{WEIGHTS_SUFFIX}")]
        others = [make() for name, make in self.elsewhere.items() if name.startswith(f"{role}/")]
        return sorted([*here, *others], key=lambda file: file.name)

    @property
    def has_new_data(self) -> bool:
        """Whether the run uses other rows than the saved run, beginning with their first."""
        return self.data_from == self.step

    @property
    def run(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return read_json(self.folder / RUN_FILE)


class CheckpointFolder:
    """The checkpoints in `path`. Any rank may read them. Only one rank of the job may change them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def candidates(self) -> list[Resumed]:
        """Returns all folders with the name of a complete checkpoint, newest first. Raises CheckpointError if `path`
        cannot be read."""
        try:
            found = [(STEP_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._cannot("read", self.path, error) from error
        return sorted((Resumed(path, int(name[1])) for name, path in found if name), key=lambda found: -found.step)

    def latest(self) -> str:
        """Describes the file `latest` for a message."""
        try:
            return f"names {(self.path / LATEST_FILE).read_text(encoding='utf-8').strip()!r}"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except UnicodeDecodeError:
            return "is no text"

    def partial(self, step: int) -> Path:
        """Returns the path of the unfinished checkpoint of `step`."""
        return partial_of(self.path / name_of(step))

    def clear_partial(self) -> None:
        """Removes the leftovers of interrupted saves. Raises CheckpointError if it cannot."""
        for left in self.path.glob(".step_*"):
            try:
                _delete(left)
            except OSError as error:
                raise self._cannot("remove", left, error) from error

    def begin(self, step: int) -> Path:
        """Makes an empty folder for the checkpoint of `step`. Every rank may call it. Raises CheckpointError if it
        cannot be made."""
        partial = self.partial(step)
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot("make", partial, error) from error
        return partial

    def complete(self, step: int, files: Mapping[str, FileRecord], run: Mapping[str, Any], keep: int) -> None:
        """Makes the checkpoint of `step` the newest one. Then removes older ones and leaves `keep` (0 leaves all).

        All `files` of the checkpoint must be durable. There must be no checkpoint of `step` or of a later step. Raises
        CheckpointError if the disk refuses a file. The previous checkpoint then remains.
        """
        partial, final = self.partial(step), self.path / name_of(step)
        try:
            write_whole(partial / RUN_FILE, json.dumps(run, indent=1))
            records = {**files, RUN_FILE: checksum(partial / RUN_FILE)}
            manifest = {name: record._asdict() for name, record in sorted(records.items())}
            write_whole(partial / MANIFEST_FILE, json.dumps(manifest, indent=1))
            put_in_place(partial, final)
        except OSError as error:
            raise self._cannot("complete", final, error) from error
        self._point_at(final)
        if keep:
            for old in self.candidates()[keep:]:
                self._remove(old.folder)

    def abandon(self, step: int) -> None:
        """Deletes the files of an unfinished checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def last_good(self) -> str:
        """Describes the newest complete checkpoint for a message."""
        try:
            complete = [found.folder for found in self.candidates() if (found.folder / MANIFEST_FILE).is_file()]
        except CheckpointError as error:
            return str(error)
        return f"the checkpoint in {complete[0]} is complete" if complete else "there is no earlier checkpoint"

    def _point_at(self, newest: Path) -> None:
        """Writes `latest`. An error is only logged, because nothing here reads this file."""
        try:
            write_whole(self.path / LATEST_FILE, newest.name + "\n")
            flush(self.path)
        except OSError as error:
            logger.warning("cannot write %s: %s; %s is complete", self.path / LATEST_FILE, error.strerror, newest)

    def _remove(self, folder: Path) -> None:
        """Deletes a checkpoint as far as possible. Renames it first, so its remains cannot be taken for a
        checkpoint."""
        beside = folder.with_name(f".{folder.name}.removed")
        with suppress(OSError):
            folder.rename(beside)
            _delete(beside)

    def _cannot(self, what: str, path: Path, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoint.dir: cannot {what} {path}: {error.strerror or error}")


def way_on(config: Config) -> str:
    """Describes for a message what a job's command does after an interruption."""
    settings = config.checkpoint
    try:
        found = CheckpointFolder(Path(config.checkpoint_dir)).candidates()
    except CheckpointError as error:
        return str(error)
    command = "the same command" + (" with checkpoint.resume=auto" if found and settings.resume != "auto" else "")
    way = f"continues from step {found[0].step}" if found else "starts at step 0, because no checkpoint was saved"
    first = "continues from a later checkpoint in the nodes' memory if there is one, else " if settings.memory else ""
    return f"{command} {first}{way}"


def name_of(step: int) -> str:
    return f"step_{step:07d}"


def is_of_run(path: Path) -> bool:
    """Returns whether `path` is a run's checkpoint or a folder of such checkpoints."""
    folders = [path, *path.iterdir()] if path.is_dir() else []
    return any(STEP_NAME.fullmatch(folder.resolve().name) and (folder / MANIFEST_FILE).exists() for folder in folders)


def checkpoint_at(path: Path, option: str = "checkpoint.resume") -> Resumed:
    """Returns the checkpoint named by `option`. The path may be its folder, or a folder of checkpoints to take the
    newest of.

    Raises CheckpointError if there is none.
    """
    if found := STEP_NAME.fullmatch(path.resolve().name):
        if (path / MANIFEST_FILE).exists():
            return Resumed(path, int(found[1]))
    elif path.is_dir() and (candidates := CheckpointFolder(path).candidates()):
        return candidates[0]
    raise CheckpointError(
        f"{option}: {path} is not a checkpoint of a run: expected {'' if option.startswith('--') else 'auto, none, '}"
        f"a folder {name_of(10)} with a {MANIFEST_FILE}, or a folder with such folders"
    )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_json(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object in a file. Raises CheckpointError if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}; expected a JSON object")
    return values
