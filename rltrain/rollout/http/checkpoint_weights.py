"""Weights that nobody changes: a checkpoint that servers load where they can."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rltrain.rollout.http.calls import Calls
from rltrain.rollout.http.protocol import ServerProtocol
from rltrain.rollout.http.weights import WholeUpdates


class CheckpointWeights(WholeUpdates):
    """Implements `Weights`, of engines that draw by a checkpoint as it is: `name` it once, or another one later."""

    way = "folder"

    def __init__(self, update_timeout_s: float) -> None:
        self.label: str | None = None
        self._update_timeout_s = update_timeout_s
        self._run = secrets.token_hex(4)
        self._path = ""

    def name(self, path: Path, version: int) -> None:
        self._path, self.label = str(path.absolute()), f"{self._run}.{version}"

    def begin(self) -> None:
        """Nothing is to be written."""

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        raise AssertionError("no part of these weights ever arrives")

    def arrived(self, part: int) -> None:
        raise AssertionError("no part of these weights ever arrives")

    def complete(self, version: int) -> None:
        """It lies there already."""

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "a checkpoint has been named"
        await protocol.load_from_disk(calls, self._path, self.label, self._update_timeout_s)

    def close(self) -> None:
        """The checkpoint is somebody else's."""
