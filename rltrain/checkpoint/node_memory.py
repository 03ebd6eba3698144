"""The checkpoints of one run in the memory of one node: a folder of a tmpfs.

    <checkpoint.memory.folder>/rltrain_<run id>/owner            the process that the job ends with
                                               /step_0000010/    as on a disk, but with the files of this node's ranks
                                                                 and the copies of those of the node before

The manifest lists the files of all nodes: which of them are here shows in the folder.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rltrain.checkpoint.memory_files import SUFFIX, Address
from rltrain.checkpoint.run_files import MANIFEST_FILE, RUN_FILE, FileRecord, read_manifest
from rltrain.checkpoint.run_folder import CheckpointFolder, name_of
from rltrain.errors import CheckpointError
from rltrain.runtime.machine import has_ended, launcher, process_here
from rltrain.runtime.whole_files import put_in_place, write_whole

# Who keeps a second copy of whose files, and which checkpoints the memory of several nodes makes whole again.


class Key(NamedTuple):
    """A checkpoint in memory. Two of one step are the same where their manifests are: `digest` is of its bytes."""

    step: int
    digest: str


def origins(hosting: Iterable[int], ranks_per_node: int) -> dict[int, list[int]]:
    """By rank, those of whose files it keeps the copy: of the node before, of which the last one's follows the first.

    `hosting`: the ranks that have something to save. No rank of another node: nobody has a copy.
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(hosting):
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    ranks = [*nodes.values()]
    found: dict[int, list[int]] = {rank: [] for of_node in ranks for rank in of_node}
    if len(ranks) > 1:
        for here, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            for index, rank in enumerate(here):
                found[after[index % len(after)]].append(rank)
    return found


def sources(names: Iterable[str], held: Sequence[Iterable[str]]) -> tuple[dict[str, int], list[str]]:
    """(the first node that has each of the files `names`, those that no node has); `held` is by node."""
    first = {name: node for node, of_node in reversed([*enumerate(held)]) for name in of_node}
    wanted = sorted(names)
    return {name: first[name] for name in wanted if name in first}, [name for name in wanted if name not in first]


def offered(by_node: Iterable[Iterable[Key]]) -> list[Key]:
    """All that any node says to hold, newest first; those of one step in an order that all ranks agree on."""
    return sorted({key for of_node in by_node for key in of_node}, key=lambda key: (-key.step, key.digest))


BLOCK_BYTES = 512
"""The unit of stat, whatever the file system's is."""
KEPT = 2
"""The newest complete ones: a node may be lost while the others have not yet learnt that the last one is complete."""
FEWEST = KEPT + 1
"""For which there must be room: the oldest goes once a newer one is complete."""
MOST = KEPT + 2
"""With those under way."""
OWNER_FILE = "owner"
"""In the run's folder: the process whose end is the job's, after all restarts."""
PREFIX = "rltrain_"

logger = logging.getLogger(__name__)


class NodeFolder:
    """`base` may name variables of the environment. Reading is for any rank of the node, removing for one."""

    def __init__(self, base: str, run_id: str) -> None:
        self.base = Path(os.path.expandvars(base))
        self.name = f"{PREFIX}{run_id}"
        self.checkpoints = CheckpointFolder(self.base / self.name)

    @property
    def path(self) -> Path:
        return self.checkpoints.path

    def at(self, step: int) -> Path:
        return self.path / name_of(step)

    def make(self) -> None:
        """For this user alone; every rank may. CheckpointError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot make {self.path}: {error.strerror}") from error

    def claim(self) -> None:
        """For this job, where it is there. CheckpointError."""
        if not self.path.is_dir():
            return
        try:
            write_whole(self.path / OWNER_FILE, process_here(launcher()))
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot write to {self.path}: {error.strerror}") from error

    def refuse_without_room(self, num_bytes: int, *, restarted: bool) -> None:
        """Where FEWEST checkpoints of `num_bytes` do not fit: CheckpointError, or a warning in a job that has been
        `restarted`, which would rather go on without."""
        held = sum(path.stat().st_blocks * BLOCK_BYTES for path in self.path.rglob("*") if path.is_file())
        there, needed = shutil.disk_usage(self.base).free + held, FEWEST * num_bytes
        if there >= needed:
            return
        problem = (
            f"checkpoint.memory.folder: {self.base} has room for {there / 1e9:.3g} GB; expected {needed / 1e9:.3g} GB "
            f"or more, as {FEWEST} checkpoints of at least {num_bytes / 1e9:.3g} GB, this node's files and those of "
            "the node before, are there at a time; make room, have the file system be larger (mount -o remount,size=; "
            "in a container --shm-size), name another folder, or leave out checkpoint.memory"
        )
        if not restarted:
            raise CheckpointError(problem)
        logger.warning("%s", problem)

    def clear_abandoned(self) -> None:
        """Remove the folders of this user's other runs on this node whose jobs have ended, after all restarts. What
        cannot be told to have ended stays, as that of a job in another container does."""
        for path in self.base.glob(f"{PREFIX}*"):
            if path.name == self.name or not _is_abandoned(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            logger.warning("removed %s, checkpoints in memory of a job that has ended", path)

    def complete(self, step: int, manifest: str, run: str) -> str | None:
        """All nodes have their files: from here on this node's can be used. What went wrong, in words, or None."""
        partial = self.checkpoints.partial(step)
        try:
            write_whole(partial / RUN_FILE, run)
            write_whole(partial / MANIFEST_FILE, manifest)
            put_in_place(partial, self.at(step), replaces=True)
        except OSError as error:
            return f"{self.at(step)}: {error.strerror}"
        for old in self.checkpoints.candidates()[KEPT:]:
            shutil.rmtree(old.folder, ignore_errors=True)
        self.drop_fetched()  # all ranks have read what the run went on from, as all have saved since
        return None

    def lack_of_room(self, step: int) -> str | None:
        """Once the checkpoint of `step` is complete: whether those to come may find the folder full, in words."""
        num_bytes = sum(path.stat().st_size for path in self.at(step).rglob("*") if path.is_file())
        free, needed = shutil.disk_usage(self.path).free, (MOST - 1) * num_bytes
        if free >= needed:
            return None
        return (
            f"checkpoint.memory.folder: {self.base} has {free / 1e9:.3g} GB free beside a checkpoint of "
            f"{num_bytes / 1e9:.3g} GB; expected {needed / 1e9:.3g} GB, as up to {MOST} are there at a time: what "
            "finds no room is given up"
        )

    def held(self) -> dict[Key, str]:
        """The text of the manifest of every complete checkpoint that is here."""
        found = {}
        for checkpoint in self.checkpoints.candidates():
            try:
                read_manifest(checkpoint.folder)
                text = (checkpoint.folder / MANIFEST_FILE).read_text(encoding="utf-8")
            except (CheckpointError, OSError, UnicodeDecodeError):
                continue  # as good as none: another node may have it
            found[Key(checkpoint.step, hashlib.sha256(text.encode()).hexdigest()[:16])] = text
        return found

    def files(self, step: int, manifest: Iterable[str]) -> list[str]:
        """Those of `manifest` that are here."""
        return [name for name in manifest if (self.at(step) / name).is_file()]

    def replace(self, step: int, manifest: str) -> None:
        """A folder for a complete checkpoint of which this node has no file. CheckpointError."""
        folder = self.at(step)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(mode=0o700, parents=True)
            write_whole(folder / MANIFEST_FILE, manifest)
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot make {folder}: {error.strerror}") from error

    def drop_fetched(self) -> None:
        """What there is of files that other nodes have, of any checkpoint."""
        for path in self.path.glob(f"*/*/*{SUFFIX}*"):
            path.unlink(missing_ok=True)

    def keep_only(self, step: int | None) -> None:
        """Remove all but the checkpoint of `step`, as far as that can be done."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                if step is None or path.name != name_of(step):
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """All of it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and has_ended((path / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def records_of(report: dict[str, list[int]]) -> dict[str, FileRecord]:
    """What a rank has told of its files in JSON."""
    return {name: FileRecord(*record) for name, record in report.items()}


# What a rank knows of its node's memory and of those of the other nodes.


@dataclass(frozen=True)
class NodeMemory:
    """`addresses`: of the nodes' file servers, in the order of the nodes, all of which serve their `folder.base`."""

    folder: NodeFolder
    addresses: Sequence[Address]
