"""The folder of a run's checkpoints: which there are, which is the newest complete one, and how one becomes complete.

    <dir>/latest                  the name of the newest one, for people and other programs: nothing here follows it
    <dir>/step_0000010/           state after 10 training steps
        manifest.json             size and checksum of every other file
        run.json                  what the run was: config, architectures, number of ranks
        <role>/..., ranks/...     safetensors
    <dir>/earlier_1/              those of later steps, where a run went back to an older one: again such a folder

A checkpoint is written beside its place and renamed when all ranks' files are durable; from then on it is the newest.
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
    """The checkpoint that a run goes on from: `step` training steps have been done.

    `continues`: the responses and the experience of later steps that it holds are used, not drawn anew. `data_from`:
    the step that takes the first of the present training rows. `logs`: on the job's leader, the bytes of the logs of
    samples that the run goes on after, those of ranks that are gone among them. `in_memory`: the folder is in the
    node's memory, and every node has one, with some of the files. `elsewhere`: what makes the others, by their names in
    the checkpoint.
    """

    folder: Path
    step: int
    continues: bool = True
    data_from: int = 0
    logs: Mapping[str, int] = field(default_factory=dict)
    in_memory: bool = False
    elsewhere: Mapping[str, Callable[[], SavedFile]] = field(default_factory=dict, compare=False, repr=False)

    def files(self, role: str) -> list[SavedFile]:
        """What the ranks of a role saved, in the order of their names. What they keep is theirs to drop."""
        here = [SavedFile(path) for path in (self.folder / role).glob(f"*{WEIGHTS_SUFFIX}")]
        others = [make() for name, make in self.elsewhere.items() if name.startswith(f"{role}/")]
        return sorted([*here, *others], key=lambda file: file.name)

    @property
    def has_new_data(self) -> bool:
        """Whether the run goes on with other rows than the checkpoint was saved with, at the first of them."""
        return self.data_from == self.step

    @property
    def run(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return read_json(self.folder / RUN_FILE)


class CheckpointFolder:
    """The checkpoints in `path`. Reading is for any rank, all else for one rank of the job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def candidates(self) -> list[Resumed]:
        """All that bear the name of a complete checkpoint, newest first. CheckpointError where that cannot be seen."""
        try:
            found = [(STEP_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._cannot("read", self.path, error) from error
        return sorted((Resumed(path, int(name[1])) for name, path in found if name), key=lambda found: -found.step)

    def latest(self) -> str:
        """What the file of that name says, in words."""
        try:
            return f"names {(self.path / LATEST_FILE).read_text(encoding='utf-8').strip()!r}"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except UnicodeDecodeError:
            return "is no text"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of `step` is written until it is complete."""
        return partial_of(self.path / name_of(step))

    def clear_partial(self) -> None:
        """Remove what interrupted saves left. CheckpointError where that fails."""
        for left in self.path.glob(".step_*"):
            try:
                _delete(left)
            except OSError as error:
                raise self._cannot("remove", left, error) from error

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of `step`; every rank may make it. CheckpointError."""
        partial = self.partial(step)
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot("make", partial, error) from error
        return partial

    def complete(self, step: int, files: Mapping[str, FileRecord], run: Mapping[str, Any], keep: int) -> None:
        """All `files` of the checkpoint are durable: make it the newest one, and remove all but `keep` (0: none).

        CheckpointError where the disk does not take it; the one before is then still there. No checkpoint of `step` or
        of a later one may be there.
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
        """Give the room of an unfinished checkpoint back."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def last_good(self) -> str:
        """In words, for messages: the checkpoint that is there."""
        try:
            complete = [found.folder for found in self.candidates() if (found.folder / MANIFEST_FILE).is_file()]
        except CheckpointError as error:
            return str(error)
        return f"the checkpoint in {complete[0]} is complete" if complete else "there is none before it"

    def _point_at(self, newest: Path) -> None:
        """Nothing here follows `latest`, so that no run ends because it cannot be written."""
        try:
            write_whole(self.path / LATEST_FILE, newest.name + "\n")
            flush(self.path)
        except OSError as error:
            logger.warning("cannot write %s: %s; %s is complete", self.path / LATEST_FILE, error.strerror, newest)

    def _remove(self, folder: Path) -> None:
        """As far as that can be done; never in parts that could be taken for a checkpoint."""
        beside = folder.with_name(f".{folder.name}.removed")
        with suppress(OSError):
            folder.rename(beside)
            _delete(beside)

    def _cannot(self, what: str, path: Path, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoint.dir: cannot {what} {path}: {error.strerror or error}")


def way_on(config: Config) -> str:
    """Returns in words what the command of a job does when it is given again after the job was interrupted."""
    settings = config.checkpoint
    try:
        found = CheckpointFolder(Path(config.checkpoint_dir)).candidates()
    except CheckpointError as error:
        return str(error)
    command = "the same command" + (" with checkpoint.resume=auto" if found and settings.resume != "auto" else "")
    way = f"goes on from step {found[0].step}" if found else "begins anew, as no checkpoint was saved"
    first = "goes on from the nodes' memory where that holds a later checkpoint, and else " if settings.memory else ""
    return f"{command} {first}{way}"


def name_of(step: int) -> str:
    return f"step_{step:07d}"


def is_of_run(path: Path) -> bool:
    """Whether it is the folder of a run's checkpoint, or one of several."""
    folders = [path, *path.iterdir()] if path.is_dir() else []
    return any(STEP_NAME.fullmatch(folder.resolve().name) and (folder / MANIFEST_FILE).exists() for folder in folders)


def checkpoint_at(path: Path, option: str = "checkpoint.resume") -> Resumed:
    """The checkpoint that a user names by `option`: its own folder, or one of several, of which the newest is taken.

    CheckpointError where there is none.
    """
    if found := STEP_NAME.fullmatch(path.resolve().name):
        if (path / MANIFEST_FILE).exists():
            return Resumed(path, int(found[1]))
    elif path.is_dir() and (candidates := CheckpointFolder(path).candidates()):
        return candidates[0]
    raise CheckpointError(
        f"{option}: {path} is not a checkpoint of a run: expected {'' if option.startswith('--') else 'auto, none, '}"
        f"a folder {name_of(10)} with a {MANIFEST_FILE}, or a folder of such"
    )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_json(path: Path) -> Mapping[str, Any]:
    """CheckpointError where it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}; expected a JSON object")
    return values
