"""Another checkpoint for a server's engine, asked for in the web server's thread, loaded in that of the engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf import load_parameters
from rltrain.errors import CheckpointError
from rltrain.models import read_architecture
from rltrain.rollout.embedded import EmbeddedEngine, allocate_parameters
from rltrain.rollout.layout import engine_layout, form
from rltrain.runtime.grid import Grid
from rltrain.serving.deltas import apply_delta, check_delta

STARTED_WITH = "default"
"""What SGLang calls weights that nobody has given a version."""
NO_VERSION = "none: an update broke off"
"""Of weights of which only a part is new."""


@dataclass(frozen=True)
class _Reload:
    checkpoint: Path
    label: str | None
    done: "Future[None]"


class Reloads:
    """Implements `EngineControl`. `carry_out` is for the thread that steps `engine`, which `wake` has look at it."""

    def __init__(self, engine: EmbeddedEngine, checkpoint: Path, dtype: str, wake: Callable[[], None]) -> None:
        self.checkpoint = checkpoint
        self._engine, self._wake = engine, wake
        self._architecture = read_architecture(checkpoint, "--checkpoint")
        self._layout = engine_layout(self._architecture, Grid((0,)), dtype=dtype)
        assert engine.policy_version is not None
        self._version, self._labels = engine.policy_version, {engine.policy_version: STARTED_WITH}
        self._asked: list[_Reload] = []
        self._lock = threading.Lock()

    def label(self, version: int | None = None) -> str:
        return self._labels[self._version if version is None else version]

    async def reload(self, checkpoint: Path, label: str | None) -> None:
        asked = _Reload(checkpoint, label, Future())
        with self._lock:
            self._asked.append(asked)
        self._wake()
        await asyncio.wrap_future(asked.done)

    def carry_out(self) -> None:
        """What has been asked for since the last call. Between two steps."""
        with self._lock:
            asked, self._asked = self._asked, []
        for one in asked:
            try:
                self._load(one)
            except Exception as error:  # noqa: BLE001 - it is raised again where the reload was asked for
                one.done.set_exception(error)
            else:
                one.done.set_result(None)

    def _load(self, asked: _Reload) -> None:
        if form.is_delta(asked.checkpoint):
            self._apply(asked)
        else:
            self._load_whole(asked)

    def _load_whole(self, asked: _Reload) -> None:
        """All of it is read before anything is overwritten."""
        if read_architecture(asked.checkpoint, "model_path") != self._architecture:
            raise CheckpointError(
                f"model_path: the model in {asked.checkpoint} has another architecture than the one that is served, "
                f"{self.checkpoint}; expected the same: start another server for it"
            )
        layout = self._layout
        read = allocate_parameters(layout, 0, device=torch.device("cpu"))
        load_parameters(asked.checkpoint, layout, 0, read, config_key="model_path")
        with self._update(asked.label or self.label()) as parameters:
            for name, parameter in parameters.items():
                parameter.copy_(read[name])
        self.checkpoint = asked.checkpoint

    def _apply(self, asked: _Reload) -> None:
        """What changed since the version that is served, and which no other may be given; it is checked before."""
        try:
            delta = form.Delta(asked.checkpoint)
        except form.DeltaRefused as refused:
            raise CheckpointError(f"model_path: {refused}") from None
        if asked.label not in (None, delta.version):
            raise CheckpointError(
                f"weight_version: got {asked.label} with {delta.folder}, which makes version {delta.version}"
            )
        check_delta(delta, self.label(), self._layout)
        with self._update(delta.version) as parameters:
            apply_delta(delta, self._layout, parameters)

    @contextmanager
    def _update(self, label: str) -> Iterator[Mapping[str, Tensor]]:
        """The engine's parameters, to be written; then they are called `label`, or where that fails of no version."""
        version = self._version + 1
        self._engine.begin_update()
        self._labels[version] = NO_VERSION
        try:
            yield self._engine.incoming(0)
            self._labels[version] = label
        finally:
            self._engine.end_update(version)
            self._version = version
