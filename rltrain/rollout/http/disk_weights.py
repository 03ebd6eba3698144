"""Weights as a checkpoint in a folder that servers see: ranks write it together, servers load it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.reshard.layout import Layout
from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.protocol import ServerProtocol
from rltrain.rollout.http.shared_folders import SharedFolders
from rltrain.rollout.http.weights import WholeUpdates, empty_tensors, shared_run
from rltrain.rollout.layout import form
from rltrain.runtime.job_store import JobStore

FOLDER, DELTA_FOLDER = "version_{}", "delta_{}"


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
