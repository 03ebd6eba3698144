"""New weights for servers at URLs in a folder on shared storage: checkpoints, files of changes, or adapters."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.peft_files import trained_adapters, write_files
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.config.models import Lora
from rltrain.config.schema import WeightDelta
from rltrain.errors import ConfigError, cannot_write
from rltrain.reshard.changes import changes_on
from rltrain.reshard.delta import DeltaTurn, DeltaTurns
from rltrain.reshard.layout import Layout
from rltrain.rollout.delta_form import encoded, form, write_changes
from rltrain.rollout.servers.calls import Calls, ServerRefuses
from rltrain.rollout.servers.http_weights import Weights, empty_tensors, shared_run
from rltrain.rollout.servers.protocols import ADAPTER, ServerProtocol
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.whole_files import make_empty, put_in_place

# Folders on shared storage, written by all ranks of a role together. A folder appears complete or not at all.

T = TypeVar("T")
PARTIAL = ".rltrain_{}.partial"


class SharedFolders:
    """Temporary and complete folders inside `folder`. Messages name it by `config_key`.

    The first of `ranks` creates, renames and removes them. At the start it removes the folders of an earlier run, known
    by `patterns` of their names. `begin` and `complete` are collective over: `ranks`.
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
        """Returns a new temporary folder. No server reads it."""
        self._number += 1
        partial, made = self._partial, f"{self._key}/{self._number}/made"
        if self.leads:
            self.writing(partial, lambda: make_empty(partial))
            self._forget(self._number - 2)
            self._job_store.put(made, True)
        self._job_store.get(made, waiting_for=f"the folder {partial}")
        return partial

    def complete(self, name: str, wrote: Any, finish: Callable[[Path, list[Any]], None]) -> tuple[Path, list[Any]]:
        """Renames the temporary folder to `name` once every rank has written its share.

        `wrote` is this rank's JSON value. `finish` is called before on the first rank, with the temporary folder and
        the values of all ranks. Returns the final path and these values, in the order of ranks.
        """
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
        """Removes folders that servers do not need any more."""
        for path in paths if self.leads else ():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        if self.leads:
            self._clear()

    def writing(self, path: Path, write: Callable[[], T]) -> T:
        """Returns the result of `write`. Raises ConfigError with the config key if `path` cannot be written."""
        try:
            return write()
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    @property
    def _partial(self) -> Path:
        return self._folder / PARTIAL.format(self._number)

    def _forget(self, update: int) -> None:
        """Deletes the store's entries of an earlier update. All ranks must have left it."""
        if update > 0:
            for told in ("made", "complete", *(f"written/{rank}" for rank in self._ranks)):
                self._job_store.forget(f"{self._key}/{update}/{told}")

    def _clear(self) -> None:
        """Removes this class's folders, and then `folder` if it is empty."""
        if not self._folder.exists():
            return
        if not self._folder.is_dir():
            raise ConfigError(f"{self._config_key}: {self._folder} is not a folder; expected a folder or a new path")
        for pattern in (*self._patterns, PARTIAL):
            for path in self._folder.glob(pattern.format("*")):
                shutil.rmtree(path, ignore_errors=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


# Weights as a checkpoint in a shared folder. Ranks write it together and servers load it.

FOLDER, DELTA_FOLDER, ADAPTERS_FOLDER = "version_{}", "delta_{}", "adapters_{}"


class DiskWeights(Weights):
    """Weights as checkpoints in a folder. The previous version stays until the next one is complete, so a joining
    server always finds one. Folders of an earlier run are removed.

    - `whole` is the layout of all tensors on the ranks of the role, from reshard.layout.hf_layout. `parts` divide it
      into parts of at most `max_bytes`, one file each.
    - `like` is the checkpoint folder whose config and tokenizer are copied.
    - `config_key` is the key that sets `folder`, for messages.
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
        """The last complete checkpoint."""
        self.partial = Path()
        """The temporary folder of the update under way."""
        self.held: dict[str, Tensor] = {}
        """The part being written."""
        self.num_bytes = 0
        """Bytes of tensors in all files of the last update, over all ranks."""
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
            patterns=(FOLDER, DELTA_FOLDER, ADAPTERS_FOLDER),
        )
        self._run = shared_run(job_store, role, leads=self.folders.leads)

    def label_of(self, version: int) -> str:
        """Returns the label of a version, unique among all jobs."""
        return f"{self._run}.{version}"

    def is_of_run(self, label: str | None) -> bool:
        """Returns whether a server with this label has got weights in this run."""
        return label is not None and label.startswith(f"{self._run}.")

    def begin(self) -> None:
        self.partial = self.folders.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        self.held = empty_tensors(self._parts[part], self.rank, self.device)
        return self.held

    def arrived(self, part: int) -> None:
        """Writes the part's tensors durably."""
        if part < len(self._mine):
            self._write(self._mine[part])
        self.held = {}

    def complete(self, version: int) -> None:
        """Completes the checkpoint and removes the one before. No rank has servers load that one during an update."""
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
        """Writes the index, config, tokenizer and version files."""
        dtype = str(self._files[0].entries[0].dtype).removeprefix("torch.")
        write_index(partial, self._files)
        write_config(self._like, partial, dtype)
        copy_carried_files(self._like, partial)
        (partial / form.VERSION_FILE).write_text(form.version_text(label))


# Weights as files of changes, with a whole checkpoint from time to time.

logger = logging.getLogger(__name__)

FILE = "changes-{:05d}-{:05d}.delta"
"""File name by rank and part. Servers do not take such a file for part of a checkpoint."""


class DeltaWeights(Weights):
    """Weights as deltas: `whole` writes checkpoints, and updates in between write only changed elements. For comparison
    a rank keeps its share of the last version.

    The last checkpoint and the deltas since then form a chain. All of it stays until the next checkpoint. A server gets
    the links after its own version, or the whole chain if it has none of them. A checkpoint is written as often as
    `delta.full_every` says, if deltas save nothing, or once the deltas of the chain have as many bytes as the
    checkpoint.
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
        """Bytes and checksums of this update's delta files, by name."""
        self._chain: list[tuple[str, Path]] = []
        """Labels and folders of the chain, in order. The first folder is a checkpoint."""
        self._chain_bytes = self._num_bytes = 0
        """Bytes of the deltas in the chain, and of the last update."""

    def begin(self) -> None:
        is_long = len(self._chain) > 1 and self._chain_bytes >= self._whole.num_bytes
        self._turn, self._wrote = self._turns.next(lost=is_long), {}
        if self._turn is DeltaTurn.PLAIN:
            self._kept = {}
        self._whole.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        return self._whole.tensors(part)

    def arrived(self, part: int) -> None:
        """Writes the part's tensors or their changes durably."""
        held = self._whole.held
        if self._turn is DeltaTurn.CHANGES:
            self._write_changes(part, held)
            return
        self._whole.arrived(part)
        if self._turn is DeltaTurn.WHOLE:
            self._kept[part] = {name: tensor.cpu() for name, tensor in held.items()} if self._keeps_on_host else held

    def complete(self, version: int) -> None:
        """Completes the update, as `DiskWeights` does. A new checkpoint removes the deltas before it."""
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
        """Delivers the links of the chain after the server's version. Delivers the whole chain if the server has no
        version of it, or refuses a delta."""
        label = await protocol.version(calls)
        labels = [of for of, _ in self._chain]
        first = labels.index(label) + 1 if label in labels else 0
        try:
            await self._load(protocol, calls, self._chain[first:])
        except ServerRefuses as refused:
            if not first:
                raise
            logger.warning("%s refuses the changes and is given the whole checkpoint: %s", calls.url, refused)
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


# Weights as a frozen base, once, and the files of its adapters, every time.


class AdapterWeights(Weights):
    """Weights as a frozen base and PEFT's files of its low-rank adapters.

    The first update has the base, which `base` writes in its `num_base_parts` parts. Every update has the adapters:
    each rank receives them whole in the parts `adapters`, and the first rank writes them. Base and last adapters stay
    in the folder. A server loads the base if it has got nothing in this run, and then the adapters.
    """

    way = "adapters"

    def __init__(
        self, base: DiskWeights, num_base_parts: int, adapters: Sequence[Layout], settings: Lora, checkpoint: str
    ) -> None:
        self.lora_rank = settings.rank
        self._base, self._num_base_parts, self._folders = base, num_base_parts, base.folders
        self._adapters, self._settings, self._checkpoint = adapters, settings, checkpoint
        self._trained = trained_adapters(adapters[0].tensors, settings)
        self._arriving: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}
        """The adapters of the update under way, on the first rank only."""
        self._path: Path | None = None
        self._num_bytes = 0

    def begin(self) -> None:
        self._held = {}
        if self._base.path is None:
            self._base.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        if part < self._num_base_parts:
            return self._base.tensors(part)
        self._arriving = empty_tensors(self._adapters[part - self._num_base_parts], self._base.rank, self._base.device)
        return self._arriving

    def arrived(self, part: int) -> None:
        """Writes a part of the base, or keeps a part of the adapters on the host."""
        if part < self._num_base_parts:
            self._base.arrived(part)
        elif self._folders.leads:
            self._held |= {name: tensor.cpu() for name, tensor in self._arriving.items() if name in self._trained}
        self._arriving = {}

    def complete(self, version: int) -> None:
        """Completes the files and removes the adapters before. No rank has servers load those during an update."""
        old, label, base_bytes = self._path, self._base.label_of(version), 0
        if self._base.path is None:
            self._base.complete(version)
            base_bytes = self._base.num_bytes
        self._folders.begin()
        wrote = sum(tensor.nbytes for tensor in self._held.values())
        self._path, all_wrote = self._folders.complete(
            ADAPTERS_FOLDER.format(version),
            wrote,
            lambda partial, _: write_files(partial, self._held, self._settings, self._checkpoint),
        )
        if old is not None and old != self._path:
            self._folders.remove([old])
        self._held = {}
        self._num_bytes, self.label, self.adapter = base_bytes + sum(all_wrote), label, ADAPTER + label

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self._path is not None and self.label is not None, "an update is complete"
        base = None if self._base.is_of_run(await protocol.version(calls)) else str(self._base.path)
        assert protocol.adapters is not None, "other servers are refused"
        await protocol.adapters.load(calls, base, str(self._path), self.label, self._base.update_timeout_s)

    def metrics(self) -> dict[str, float]:
        return {"rollout/weight_files_bytes": float(self._num_bytes)}

    def close(self) -> None:
        self._base.close()
