"""Weights as a checkpoint in a folder that servers see: ranks write it together, servers load it."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.errors import ConfigError, cannot_write
from rltrain.liveness.job_store import JobStore
from rltrain.reshard.layout import Layout
from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.protocol import ServerProtocol
from rltrain.rollout.http.weights import WholeUpdates, empty_tensors, shared_run

FOLDER = "version_{}"
PARTIAL = ".version_{}.partial"


class DiskWeights(WholeUpdates):
    """Implements `Weights`. `whole` is what hf_layout makes for the ranks of the role, `parts` the same in parts of
    `max_bytes`: a file each. `like` is the checkpoint folder whose config and tokenizer go with them, `config_key` the
    one that says where `folder` is.

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
        self.label: str | None = None
        self._parts, self._rank, self._device = parts, rank, device
        self._folder, self._like, self._config_key = folder.absolute(), like, config_key
        self._job_store, self._key = job_store, f"http/{role}/weights"
        self._ranks, self._leads = whole.ranks, rank == whole.ranks[0]
        self._update_timeout_s = update_timeout_s
        self._files = planned_files(whole, max_bytes)
        self._mine = [file for file in self._files if file.writer == rank]
        self._held: dict[str, Tensor] = {}
        self._num_updates = 0
        self._path: Path | None = None
        if self._leads:
            self._clear()
        self._run = shared_run(job_store, role, leads=self._leads)

    def begin(self) -> None:
        self._num_updates += 1
        made = f"{self._key}/{self._num_updates}/made"
        if self._leads:
            self._make(self._partial)
            self._forget(self._num_updates - 2)
            self._job_store.put(made, True)
        self._job_store.get(made, waiting_for=f"the folder {self._partial}")

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        self._held = empty_tensors(self._parts[part], self._rank, self._device)
        return self._held

    def arrived(self, part: int) -> None:
        """Write them, durably."""
        if part < len(self._mine):
            self._write(self._mine[part])
        self._held = {}

    def complete(self, version: int) -> None:
        """By now no rank has the version before loaded any more: it is removed."""
        name = f"{self._key}/{self._num_updates}"
        self._job_store.put(f"{name}/written/{self._rank}", True)
        path = self._folder / FOLDER.format(version)
        if self._leads:
            for rank in self._ranks:
                self._job_store.get(f"{name}/written/{rank}", waiting_for=f"the weights that rank {rank} writes")
            self._finish(path)
            self._job_store.put(f"{name}/complete", True)
        self._job_store.get(f"{name}/complete", waiting_for=f"the checkpoint {path}")
        self._path, self.label = path, f"{self._run}.{version}"

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self._path is not None and self.label is not None, "an update is complete"
        await protocol.load_from_disk(calls, str(self._path), self.label, self._update_timeout_s)

    def close(self) -> None:
        if self._leads:
            self._clear()

    @property
    def _partial(self) -> Path:
        return self._folder / PARTIAL.format(self._num_updates)

    def _forget(self, update: int) -> None:
        """What ranks told each other in an update that all of them have left."""
        if update > 0:
            for told in ("made", "complete", *(f"written/{rank}" for rank in self._ranks)):
                self._job_store.forget(f"{self._key}/{update}/{told}")

    def _write(self, file: HfFile) -> None:
        path = self._partial / file.name
        try:
            with SafetensorsFile(path, file.entries, METADATA) as opened:
                for entry in opened.entries:
                    opened.append(entry.name, self._held[entry.name])
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    def _make(self, path: Path) -> None:
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    def _finish(self, path: Path) -> None:
        dtype = str(self._files[0].entries[0].dtype).removeprefix("torch.")
        try:
            write_index(self._partial, self._files)
            write_config(self._like, self._partial, dtype)
            copy_carried_files(self._like, self._partial)
            shutil.rmtree(path, ignore_errors=True)
            self._partial.rename(path)
            if self._path is not None and self._path != path:
                shutil.rmtree(self._path, ignore_errors=True)
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    def _clear(self) -> None:
        """Remove what has the names of versions, and the folder if nothing else is in it."""
        if not self._folder.exists():
            return
        if not self._folder.is_dir():
            raise ConfigError(f"{self._config_key}: {self._folder} is not a folder; expected one, or none yet")
        for pattern in (FOLDER, PARTIAL):
            for path in self._folder.glob(pattern.format("*")):
                shutil.rmtree(path, ignore_errors=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()
