"""Weights as a checkpoint in a folder now and then, and in between as files of what changed since the last version."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.reshard.changes import changes_on
from rltrain.reshard.delta_turns import Turn, Turns
from rltrain.rollout.http.calls import Calls, ServerRefuses
from rltrain.rollout.http.delta_files import encoded, write_changes
from rltrain.rollout.http.disk_weights import DELTA_FOLDER, DiskWeights
from rltrain.rollout.http.protocol import ServerProtocol
from rltrain.rollout.http.weights import WholeUpdates
from rltrain.rollout.layout import form

logger = logging.getLogger(__name__)

FILE = "changes-{:05d}-{:05d}.delta"
"""By rank and part. No server takes such a file for one of a checkpoint."""


class DeltaWeights(WholeUpdates):
    """Implements `Weights`: `whole` writes checkpoints, and in between what changed alone is written, element by
    element. A rank remembers its share of the last version for that.

    The checkpoint that was written last and the deltas since then are a chain, of which all stays until the next
    checkpoint: a server gets what lies behind the version that it has, or everything where it has none of them. A
    checkpoint is written where `delta` says, where deltas save nothing, and once those of the chain have as many bytes
    as it has.
    """

    way = "delta"

    def __init__(self, whole: DiskWeights, delta: WeightDelta) -> None:
        self.label: str | None = None
        self._whole, self._folders = whole, whole.folders
        self._turns, self._turn = Turns(delta.full_every), Turn.PLAIN
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
        if self._turn is Turn.PLAIN:
            self._kept = {}
        self._whole.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        return self._whole.tensors(part)

    def arrived(self, part: int) -> None:
        """Write them, or what changed of them, durably."""
        held = self._whole.held
        if self._turn is Turn.CHANGES:
            self._write_changes(part, held)
            return
        self._whole.arrived(part)
        if self._turn is Turn.WHOLE:
            self._kept[part] = {name: tensor.cpu() for name, tensor in held.items()} if self._keeps_on_host else held

    def complete(self, version: int) -> None:
        """As `DiskWeights`; after a checkpoint the deltas before it are removed."""
        label = self._whole.label_of(version)
        if self._turn is Turn.CHANGES:
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
            "rollout/weight_files_are_full": float(self._turn is not Turn.CHANGES),
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
