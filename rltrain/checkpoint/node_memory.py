"""The checkpoints of one run in the memory of one node, as a folder of a tmpfs.

    <checkpoint.memory.folder>/rltrain_<run id>/owner            the job's launcher; it lives as long as the job
                                               /step_0000010/    as on a disk, but with the files of this node's ranks
                                                                 and copies of the files of the previous node's ranks

The manifest lists the files of all nodes. The folder shows which of them are on this node.
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

# Second copies of files, and the choice of complete checkpoints in the memory of several nodes.


class Key(NamedTuple):
    """A checkpoint in memory. Two of one step are the same if their manifests are. `digest` is a hash of the
    manifest."""

    step: int
    digest: str


def origins(hosting: Iterable[int], ranks_per_node: int) -> dict[int, list[int]]:
    """Returns a list of ranks for each rank. It keeps second copies of their files. These ranks are on the previous
    node, and the last node comes before the first.

    `hosting` are the ranks with something to save. With a single node, no rank has copies.
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
    """Returns (the first node with each of the files `names`, the files on no node). `held` has the files of each
    node."""
    first = {name: node for node, of_node in reversed([*enumerate(held)]) for name in of_node}
    wanted = sorted(names)
    return {name: first[name] for name in wanted if name in first}, [name for name in wanted if name not in first]


def offered(by_node: Iterable[Iterable[Key]]) -> list[Key]:
    """Returns all checkpoints of any node, newest first. All ranks get the same order for several of one step."""
    return sorted({key for of_node in by_node for key in of_node}, key=lambda key: (-key.step, key.digest))


BLOCK_BYTES = 512
"""The unit of st_blocks, for any file system."""
KEPT = 2
"""Number of newest complete checkpoints to keep. If a node is lost, the others may not know yet whether the last one is
complete."""
FEWEST = KEPT + 1
"""Number of checkpoints to have room for. The oldest is removed once a newer one is complete."""
MOST = KEPT + 2
"""Number of checkpoints at a time, including unfinished ones."""
OWNER_FILE = "owner"
"""A file in the run's folder with the job's launcher. Once this process has ended, the job has, after all restarts."""
PREFIX = "rltrain_"

logger = logging.getLogger(__name__)


class NodeFolder:
    """A run's folder in the node's memory. Any rank of the node may read. Only one may remove.

    `base` may contain environment variables.
    """

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
        """Makes the folder, readable only by this user. Every rank may call it. Raises CheckpointError if it cannot be
        made."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot make {self.path}: {error.strerror}") from error

    def claim(self) -> None:
        """Claims the folder for this job, if it exists. Raises CheckpointError if it cannot be written."""
        if not self.path.is_dir():
            return
        try:
            write_whole(self.path / OWNER_FILE, process_here(launcher()))
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot write to {self.path}: {error.strerror}") from error

    def refuse_without_room(self, num_bytes: int, *, restarted: bool) -> None:
        """Raises CheckpointError if FEWEST checkpoints of `num_bytes` do not fit. A `restarted` job only gets a
        warning, because it should rather continue without them."""
        held = sum(path.stat().st_blocks * BLOCK_BYTES for path in self.path.rglob("*") if path.is_file())
        there, needed = shutil.disk_usage(self.base).free + held, FEWEST * num_bytes
        if there >= needed:
            return
        problem = (
            f"checkpoint.memory.folder: {self.base} has room for {there / 1e9:.3g} GB; expected {needed / 1e9:.3g} GB "
            f"or more, for {FEWEST} checkpoints of at least {num_bytes / 1e9:.3g} GB (this node's files and copies of "
            "the previous node's). Make room, enlarge the file system (mount -o remount,size=; in a container "
            "--shm-size), name another folder, or leave out checkpoint.memory"
        )
        if not restarted:
            raise CheckpointError(problem)
        logger.warning("%s", problem)

    def clear_abandoned(self) -> None:
        """Removes the folders of this user's other runs on this node if their jobs have ended, after all restarts. In
        doubt a folder stays, such as the folder of a job in another container."""
        for path in self.base.glob(f"{PREFIX}*"):
            if path.name == self.name or not _is_abandoned(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            logger.warning("removed %s, checkpoints in memory of a job that has ended", path)

    def complete(self, step: int, manifest: str, run: str) -> str | None:
        """Makes the checkpoint of `step` usable, once all nodes have their files. Returns None, or a description of the
        failure."""
        partial = self.checkpoints.partial(step)
        try:
            write_whole(partial / RUN_FILE, run)
            write_whole(partial / MANIFEST_FILE, manifest)
            put_in_place(partial, self.at(step), replaces=True)
        except OSError as error:
            return f"{self.at(step)}: {error.strerror}"
        for old in self.checkpoints.candidates()[KEPT:]:
            shutil.rmtree(old.folder, ignore_errors=True)
        self.drop_fetched()  # all ranks have saved since, so all have read them
        return None

    def lack_of_room(self, step: int) -> str | None:
        """Returns a warning if later checkpoints may not fit. Call it after the checkpoint of `step` is complete."""
        num_bytes = sum(path.stat().st_size for path in self.at(step).rglob("*") if path.is_file())
        free, needed = shutil.disk_usage(self.path).free, (MOST - 1) * num_bytes
        if free >= needed:
            return None
        return (
            f"checkpoint.memory.folder: {self.base} has {free / 1e9:.3g} GB free beside a checkpoint of "
            f"{num_bytes / 1e9:.3g} GB; expected {needed / 1e9:.3g} GB, because up to {MOST} exist at a time. "
            "Checkpoints without room are given up"
        )

    def held(self) -> dict[Key, str]:
        """Returns the text of the manifest of every complete checkpoint on this node."""
        found = {}
        for checkpoint in self.checkpoints.candidates():
            try:
                read_manifest(checkpoint.folder)
                text = (checkpoint.folder / MANIFEST_FILE).read_text(encoding="utf-8")
            except (CheckpointError, OSError, UnicodeDecodeError):
                continue  # treated as missing: another node may have it
            found[Key(checkpoint.step, hashlib.sha256(text.encode()).hexdigest()[:16])] = text
        return found

    def files(self, step: int, manifest: Iterable[str]) -> list[str]:
        """Returns the files of `manifest` on this node."""
        return [name for name in manifest if (self.at(step) / name).is_file()]

    def replace(self, step: int, manifest: str) -> None:
        """Makes the folder of a complete checkpoint without any file on this node. Raises CheckpointError if it cannot
        be made."""
        folder = self.at(step)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(mode=0o700, parents=True)
            write_whole(folder / MANIFEST_FILE, manifest)
        except OSError as error:
            raise CheckpointError(f"checkpoint.memory.folder: cannot make {folder}: {error.strerror}") from error

    def drop_fetched(self) -> None:
        """Removes the copies of files fetched from other nodes, for all checkpoints."""
        for path in self.path.glob(f"*/*/*{SUFFIX}*"):
            path.unlink(missing_ok=True)

    def keep_only(self, step: int | None) -> None:
        """Removes all checkpoints except the one of `step`, as far as possible."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                if step is None or path.name != name_of(step):
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Removes the whole folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and has_ended((path / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def records_of(report: dict[str, list[int]]) -> dict[str, FileRecord]:
    """Returns the records of a rank's files from its JSON report."""
    return {name: FileRecord(*record) for name, record in report.items()}


# A rank's view of its node's memory and of the other nodes' memory.


@dataclass(frozen=True)
class NodeMemory:
    """The node's folder, and the addresses of the nodes' file servers in the order of the nodes. Every server serves
    its `folder.base`."""

    folder: NodeFolder
    addresses: Sequence[Address]
