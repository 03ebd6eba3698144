"""Weights through a folder that servers see: whole checkpoints, and files of what changed."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from rltrain.config.schema import WeightDelta
from rltrain.errors import ConfigError, cannot_write
from rltrain.reshard.changes import Changes, Extent, changes_on, mark
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.delta import DeltaTurn, DeltaTurns
from rltrain.reshard.layout import Layout
from rltrain.rollout.delta_form import form
from rltrain.rollout.servers.calls import Calls, ServerRefuses
from rltrain.rollout.servers.http_weights import Weights, empty_tensors, shared_run
from rltrain.rollout.servers.protocols import ServerProtocol
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.whole_files import make_empty, put_in_place

# Files of what changed: a part's tensors compared with those that were sent last, encoded and written.
#
# rltrain/rollout/sglang/server/rltrain_delta_files.py says what is in them, and reads them.

FileRecord = tuple[int, int]
"""Bytes of a file, and their CRC-32."""


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """What changed of a tensor, at least one element; `checksum` is that of all of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent
    encoded: Tensor
    checksum: int

    @property
    def arrays(self) -> dict[str, Tensor]:
        """By their names in a file."""
        lengths, places, values = self.extent.parts(self.encoded)
        return {
            self.name + form.LENGTHS: lengths,
            self.name + form.PLACES: places,
            self.name + form.VALUES: values.view(self.dtype),
        }

    @property
    def told(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": [*self.shape], "checksum": self.checksum}


def encoded(changes: Changes, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> list[EncodedTensor]:
    """What of `tensors` differs, as bits, from what is `kept`, which then equals them. `tensors` are on the device of
    `changes`."""
    found = []
    for name, tensor in tensors.items():
        packed, before = _bytes_of(tensor), _bytes_of(kept[name])
        remembered = before.to(packed.device)
        marks = mark(changes, packed, remembered, tensor.itemsize)
        if marks.extent.values:
            out = torch.empty(marks.extent.num_bytes, dtype=torch.uint8, device=packed.device)
            changes.write(packed, remembered, marks, marks.extent.parts(out))
            shape = tuple(tensor.shape)
            found.append(EncodedTensor(name, tensor.dtype, shape, marks.extent, out, checksum_of(tensor)))
            if remembered.data_ptr() != before.data_ptr():
                before.copy_(remembered)
    return found


def write_changes(path: Path, tensors: list[EncodedTensor]) -> FileRecord:
    """A new file, durable. OSError where it cannot be written."""
    arrays = {name: array for tensor in tensors for name, array in tensor.arrays.items()}
    entries = [TensorEntry(name, array.dtype, tuple(array.shape)) for name, array in arrays.items()]
    metadata = {**METADATA, form.METADATA: json.dumps({tensor.name: tensor.told for tensor in tensors})}
    with SafetensorsFile(path, entries, metadata, checksum=True) as opened:
        for entry in opened.entries:
            opened.append(entry.name, arrays[entry.name])
    return opened.num_bytes, opened.crc32


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


# Folders on storage that servers see: the ranks of a role write one together, and all of it is there or nothing.

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
            self.writing(partial, lambda: make_empty(partial))
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
            self.writing(path, lambda: finish(partial, all_wrote))
            self.writing(path, lambda: put_in_place(partial, path, replaces=True))
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


# Weights as a checkpoint in a folder that servers see: ranks write it together, servers load it.

FOLDER, DELTA_FOLDER = "version_{}", "delta_{}"


class DiskWeights(Weights):
    """By checkpoints in a folder. `whole` is what hf_layout makes for the ranks of the role, `parts` the same in parts
    of `max_bytes`: a file each. `like` is the checkpoint folder whose config and tokenizer go with them, `config_key`
    the one that says where `folder` is.

    While the next version is written the present one stays: a server that joins is given it. What an earlier run of the
    job left in `folder` is removed.
    """

    way = "folder"

    def __init__(
        self,
        whole: Layout,
        parts: Sequence[Layout],
        max_bytes: int,
        rank: int,
        *,
        device: torch.device,
        folder: Path,
        like: Path,
        job_store: JobStore,
        role: str,
        config_key: str,
        update_timeout_s: float,
    ) -> None:
        self.path: Path | None = None
        """Of the checkpoint that was written last."""
        self.partial = Path()
        """What ranks write into in the update that is under way."""
        self.held: dict[str, Tensor] = {}
        """The part that is being written."""
        self.num_bytes = 0
        """Of tensors in all files of the last update, those of other ranks too."""
        self.rank, self.device, self.update_timeout_s = rank, device, update_timeout_s
        self._parts, self._like = parts, like
        self._files = planned_files(whole, max_bytes)
        self._mine = [file for file in self._files if file.writer == rank]
        self.folders = SharedFolders(
            folder,
            whole.ranks,
            rank,
            job_store=job_store,
            key=f"http/{role}/weights",
            config_key=config_key,
            patterns=(FOLDER, DELTA_FOLDER),
        )
        self._run = shared_run(job_store, role, leads=self.folders.leads)

    def label_of(self, version: int) -> str:
        return f"{self._run}.{version}"

    def begin(self) -> None:
        self.partial = self.folders.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        self.held = empty_tensors(self._parts[part], self.rank, self.device)
        return self.held

    def arrived(self, part: int) -> None:
        """Write them, durably."""
        if part < len(self._mine):
            self._write(self._mine[part])
        self.held = {}

    def complete(self, version: int) -> None:
        """By now no rank has the version before loaded any more: it is removed."""
        old, label = self.path, self.label_of(version)
        wrote = sum(entry.bytes for file in self._mine for entry in file.entries)
        self.path, all_wrote = self.folders.complete(
            FOLDER.format(version), wrote, lambda partial, _: self._finish(partial, label)
        )
        if old is not None and old != self.path:
            self.folders.remove([old])
        self.num_bytes, self.label = sum(all_wrote), label

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.path is not None and self.label is not None, "an update is complete"
        await protocol.load_from_disk(calls, str(self.path), self.label, self.update_timeout_s)

    def metrics(self) -> dict[str, float]:
        return {"rollout/weight_files_bytes": float(self.num_bytes)}

    def close(self) -> None:
        self.folders.close()

    def _write(self, file: HfFile) -> None:
        path = self.partial / file.name

        def write() -> None:
            with SafetensorsFile(path, file.entries, METADATA) as opened:
                for entry in opened.entries:
                    opened.append(entry.name, self.held[entry.name])

        self.folders.writing(path, write)

    def _finish(self, partial: Path, label: str) -> None:
        """What goes with the files of tensors, of a version called so."""
        dtype = str(self._files[0].entries[0].dtype).removeprefix("torch.")
        write_index(partial, self._files)
        write_config(self._like, partial, dtype)
        copy_carried_files(self._like, partial)
        (partial / form.VERSION_FILE).write_text(form.version_text(label))


# Weights as a checkpoint in a folder now and then, and in between as files of what changed since the last version.

logger = logging.getLogger(__name__)

FILE = "changes-{:05d}-{:05d}.delta"
"""By rank and part. No server takes such a file for one of a checkpoint."""


class DeltaWeights(Weights):
    """By what changed: `whole` writes checkpoints, and in between what changed alone is written, element by
    element. A rank remembers its share of the last version for that.

    The checkpoint that was written last and the deltas since then are a chain, of which all stays until the next
    checkpoint: a server gets what lies behind the version that it has, or everything where it has none of them. A
    checkpoint is written where `delta` says, where deltas save nothing, and once those of the chain have as many bytes
    as it has.
    """

    way = "delta"

    def __init__(self, whole: DiskWeights, delta: WeightDelta) -> None:
        self._whole, self._folders = whole, whole.folders
        self._turns, self._turn = DeltaTurns(delta.full_every), DeltaTurn.PLAIN
        self._keeps_on_host = delta.keep_on == "host"
        self._changes = changes_on(whole.device)
        self._kept: dict[int, Mapping[str, Tensor]] = {}
        """This rank's share of the last version, by part."""
        self._wrote: dict[str, tuple[int, int]] = {}
        """Files of changes in this update, with their bytes and checksums."""
        self._chain: list[tuple[str, Path]] = []
        """Versions' labels with the folders that bring them, in order; the first is a checkpoint."""
        self._chain_bytes = self._num_bytes = 0
        """Of the deltas in the chain; of the last update."""

    def begin(self) -> None:
        is_long = len(self._chain) > 1 and self._chain_bytes >= self._whole.num_bytes
        self._turn, self._wrote = self._turns.next(lost=is_long), {}
        if self._turn is DeltaTurn.PLAIN:
            self._kept = {}
        self._whole.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        return self._whole.tensors(part)

    def arrived(self, part: int) -> None:
        """Write them, or what changed of them, durably."""
        held = self._whole.held
        if self._turn is DeltaTurn.CHANGES:
            self._write_changes(part, held)
            return
        self._whole.arrived(part)
        if self._turn is DeltaTurn.WHOLE:
            self._kept[part] = {name: tensor.cpu() for name, tensor in held.items()} if self._keeps_on_host else held

    def complete(self, version: int) -> None:
        """As `DiskWeights`; after a checkpoint the deltas before it are removed."""
        label = self._whole.label_of(version)
        if self._turn is DeltaTurn.CHANGES:
            path, all_wrote = self._complete_delta(version, label)
            self._chain.append((label, path))
            self._num_bytes = sum(num_bytes for wrote in all_wrote for num_bytes, _ in wrote.values())
            self._chain_bytes += self._num_bytes
        else:
            deltas = [path for _, path in self._chain[1:]]
            self._whole.complete(version)
            self._folders.remove(deltas)
            assert self._whole.path is not None, "it is complete"
            self._chain, self._chain_bytes = [(label, self._whole.path)], 0
            self._num_bytes = self._whole.num_bytes
        self._turns.finished(self._turn, self._num_bytes / max(1, self._whole.num_bytes))
        self.label = label

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """What lies behind the version that it has. One that refuses a delta gets everything."""
        label = await protocol.version(calls)
        labels = [of for of, _ in self._chain]
        first = labels.index(label) + 1 if label in labels else 0
        try:
            await self._load(protocol, calls, self._chain[first:])
        except ServerRefuses as refused:
            if not first:
                raise
            logger.warning("%s is given everything, since it refuses what changed: %s", calls.url, refused)
            await self._load(protocol, calls, self._chain)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/weight_files_bytes": float(self._num_bytes),
            "rollout/weight_files_are_full": float(self._turn is not DeltaTurn.CHANGES),
        }

    def close(self) -> None:
        self._whole.close()

    async def _load(self, protocol: ServerProtocol, calls: Calls, chain: Sequence[tuple[str, Path]]) -> None:
        for label, path in chain:
            await protocol.load_from_disk(calls, str(path), label, self._whole.update_timeout_s)

    def _write_changes(self, part: int, held: Mapping[str, Tensor]) -> None:
        if changed := encoded(self._changes, held, self._kept[part]):
            path = self._whole.partial / FILE.format(self._whole.rank, part)
            self._wrote[path.name] = self._folders.writing(path, lambda: write_changes(path, changed))
        self._whole.held = {}

    def _complete_delta(self, version: int, label: str) -> tuple[Path, list[dict[str, Any]]]:
        base = self._chain[-1][0]

        def finish(partial: Path, all_wrote: list[dict[str, tuple[int, int]]]) -> None:
            files = {name: record for wrote in all_wrote for name, record in wrote.items()}
            text = form.manifest_text(base, label, files)
            (partial / form.MANIFEST).write_text(text)

        return self._folders.complete(DELTA_FOLDER.format(version), self._wrote, finish)
