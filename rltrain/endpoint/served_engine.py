"""The embedded engine on a checkpoint, and updates of its weights by checkpoints or deltas."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import held_piece, load_parameters, within
from rltrain.config.models import VisionSettings
from rltrain.data.tokenizer import TextDecoder
from rltrain.endpoint.request_images import RequestImages
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models import read_architecture
from rltrain.models.checkpoint_model import positions_of
from rltrain.models.config_file import ConfigReader
from rltrain.models.table import Array, item_bytes
from rltrain.models.vision import Vision
from rltrain.reshard.checksums import checksum_of
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.layout import Layout
from rltrain.rollout.delta_form import form
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.block_tables import GB, budget_of
from rltrain.rollout.embedded.image_features import EngineImages, ImageLimits, tower_of
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.workspace import PASS_TOKENS, workspace
from rltrain.runtime.grid import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The embedded engine on a Hugging Face checkpoint, in a process without training.


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an embedded engine on a checkpoint. `kv_cache_gb` bounds keys and values."""

    checkpoint: Path
    dtype: str
    """float32, bfloat16 or float16. "auto" takes the checkpoint's dtype."""
    device: torch.device
    max_context_tokens: int
    max_running_requests: int
    kv_cache_gb: float | str = "auto"


VISION = VisionSettings()
"""The settings of a served tower."""


def load_engine(
    settings: EngineSettings, tokenizer: "PreTrainedTokenizerBase", images: RequestImages | None = None
) -> EmbeddedEngine:
    """Returns an engine with the whole checkpoint on one device, and its tower for `images` if given. Raises UserError
    if it cannot be served."""
    architecture = read_architecture(settings.checkpoint, "--checkpoint", sees=images is not None)
    dtype = dtype_of(settings)
    grid = Grid((0,))
    layout = engine_layout(architecture, grid, dtype=dtype)
    parameters = allocate_parameters(layout, 0, device=settings.device)
    load_parameters(settings.checkpoint, layout, 0, parameters, config_key="--checkpoint")
    needed = workspace(
        architecture,
        grid,
        num_running=settings.max_running_requests,
        prefill_tokens=max(PASS_TOKENS, settings.max_context_tokens),
        item_bytes=item_bytes(dtype),
        vision=None if images is None else VISION,
    )
    return EmbeddedEngine(
        architecture,
        parameters,
        tp_group=None,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        dtype=getattr(torch, dtype),
        device=settings.device,
        tokenizer=TextDecoder(tokenizer),
        kv_budget=budget_of(settings.kv_cache_gb, settings.device, needed.generating),
        images=None if images is None else _encoder(settings, architecture.vision, parameters, images),
    )


def _encoder(
    settings: EngineSettings, vision: Vision | None, parameters: Mapping[str, Tensor], images: RequestImages
) -> EngineImages:
    assert vision is not None, "the architecture was read with its tower"
    return EngineImages(
        vision,
        tower_of(vision, settings.checkpoint, parameters, {}, settings.device),
        images.store,
        (images.rules.mean, images.rules.std),
        ImageLimits(VISION.max_patches, VISION.engine_cache_gb * GB),
        settings.device,
    )


def longest_context(checkpoint: Path, asked: int | None) -> int:
    """Returns the context length in tokens: `asked`, or by default the checkpoint's positions up to
    DEFAULT_CONTEXT_TOKENS. Raises ConfigError if `asked` exceeds the checkpoint's positions."""
    architecture = read_architecture(checkpoint, "--checkpoint")
    if asked is not None and asked > architecture.max_positions:
        raise ConfigError(
            f"--max-context-tokens: got {asked}, but the checkpoint has {positions_of(architecture)}; expected at most "
            "that"
        )
    return asked or min(architecture.max_positions, DEFAULT_CONTEXT_TOKENS)


DEFAULT_CONTEXT_TOKENS = 8192


def dtype_of(settings: EngineSettings) -> str:
    """Returns the dtype of the weights by name."""
    if settings.dtype != "auto":
        return settings.dtype
    config = ConfigReader(settings.checkpoint / "config.json", config_key="--checkpoint").values
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


# Deltas, applied in place to an engine's parameters.


def check_delta(delta: form.Delta, held: str | None, layout: Layout) -> None:
    """Checks a delta before anything is written. Raises CheckpointError if it does not follow version `held`, or if its
    tensors differ from those of `layout`."""
    try:
        described = delta.check(held)
    except form.DeltaRefused as refused:
        raise CheckpointError(f"model_path: {refused}") from None
    tensors = layout.tensors
    for name, tensor in described.items():
        expected = tensors.shapes[tensors.numbers[name]] if name in tensors.numbers else None
        if tensor.shape != expected:
            raise CheckpointError(
                f"model_path: {delta.folder} has tensor {name} of shape {list(tensor.shape)}; the served model "
                f"has {'none of that name' if expected is None else list(expected)}"
            )


def apply_delta(delta: form.Delta, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """Applies a checked delta to `parameters`.

    Raises CheckpointError if a tensor's checksum differs afterwards. The parameters then belong to no version.
    """
    mine = layout.on(layout.ranks[0])
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    try:
        for changed in delta.tensors():
            number = layout.tensors.numbers[changed.name]
            pieces = mine.pieces[mine.pieces["tensor"] == number]
            width = int(layout.tensors.matrix_shapes[number][1])
            for piece in pieces:
                _put(flats[piece["parameter"]], piece, width, changed)
            _compare(flats, pieces, width, changed)
    except form.DeltaRefused as refused:
        raise CheckpointError(f"model_path: {refused}, after some of it was applied") from None


def _put(flat: Tensor, piece: Array, width: int, changed: form.Changed) -> None:
    """Writes the changed elements inside one piece. `piece` is a PIECE record of the tensor as a matrix of `width`
    columns."""
    rows = changed.elements // width - int(piece["row"])
    columns = changed.elements % width - int(piece["col"])
    inside = (rows >= 0) & (rows < int(piece["rows"])) & (columns >= 0) & (columns < int(piece["cols"]))
    places = int(piece["offset"]) + rows[inside] * int(piece["stride"]) + columns[inside]
    flat[places.to(flat.device)] = changed.values[inside].to(flat.device, flat.dtype)


def _compare(flats: list[Tensor], pieces: Array, width: int, changed: form.Changed) -> None:
    """Compares the tensor's checksum. Does nothing if the parameters' dtype cannot hold the tensor's values exactly."""
    held_type = flats[pieces[0]["parameter"]].dtype
    if torch.promote_types(held_type, changed.dtype) != held_type:
        return
    held = torch.empty(changed.numel, dtype=changed.dtype, device=flats[0].device)
    for piece in pieces:
        held.view(-1, width)[within(piece)] = held_piece(flats, piece).to(changed.dtype)
    if checksum_of(held) != changed.checksum:
        raise CheckpointError(
            f"model_path: after the delta was applied, {changed.name} differs from the sender's tensor. Expected "
            "weights that only deltas change"
        )


# Weight updates: requested in the web server's thread and loaded in the engine's thread.

STARTED_WITH = "default"
"""SGLang's name for weights without a version."""
NO_VERSION = "none: an update broke off"
"""The label of partly written weights."""


@dataclass(frozen=True)
class _Reload:
    checkpoint: Path
    label: str | None
    done: "Future[None]"


class Reloads:
    """Weight updates for an engine in another thread. That thread calls `carry_out`; `wake` makes it do so."""

    def __init__(
        self, engine: EmbeddedEngine, checkpoint: Path, dtype: str, wake: Callable[[], None], *, sees: bool = False
    ) -> None:
        """`sees` means that the engine has the checkpoint's vision tower."""
        self.checkpoint = checkpoint
        """The whole checkpoint loaded last."""
        self._engine, self._wake, self._sees = engine, wake, sees
        self._architecture = read_architecture(checkpoint, "--checkpoint", sees=sees)
        self._layout = engine_layout(self._architecture, Grid((0,)), dtype=dtype)
        assert engine.policy_version is not None
        self._version, self._labels = engine.policy_version, {engine.policy_version: STARTED_WITH}
        self._asked: list[_Reload] = []
        self._lock = threading.Lock()

    def label(self, version: int | None = None) -> str:
        """Returns the label of the weights of a policy version, by default the current one."""
        return self._labels[self._version if version is None else version]

    async def reload(self, checkpoint: Path, label: str | None) -> None:
        """Has the engine serve a checkpoint, or a delta to the served version, between two decode steps.

        Running samples continue with the new weights. Raises UserError if the weights cannot be loaded. The engine then
        keeps its weights, unless a checked delta failed while it was applied.
        """
        asked = _Reload(checkpoint, label, Future())
        with self._lock:
            self._asked.append(asked)
        self._wake()
        await asyncio.wrap_future(asked.done)

    def carry_out(self) -> None:
        """Carries out the reloads requested since the last call. Must be called between two decode steps."""
        with self._lock:
            asked, self._asked = self._asked, []
        for one in asked:
            try:
                self._load(one)
            except Exception as error:  # noqa: BLE001 - it is raised again in `reload`
                one.done.set_exception(error)
            else:
                one.done.set_result(None)

    def _load(self, asked: _Reload) -> None:
        if form.is_delta(asked.checkpoint):
            self._apply(asked)
        else:
            self._load_whole(asked)

    def _load_whole(self, asked: _Reload) -> None:
        """Loads a checkpoint. Reads all of it before it overwrites anything."""
        if read_architecture(asked.checkpoint, "model_path", sees=self._sees) != self._architecture:
            raise CheckpointError(
                f"model_path: the model in {asked.checkpoint} has another architecture than the served model, "
                f"{self.checkpoint}; expected the same. Start another server for it"
            )
        layout = self._layout
        read = allocate_parameters(layout, 0, device=torch.device("cpu"))
        load_parameters(asked.checkpoint, layout, 0, read, config_key="model_path")
        with self._update(asked.label or self.label()) as parameters:
            for name, parameter in parameters.items():
                parameter.copy_(read[name])
        self.checkpoint = asked.checkpoint

    def _apply(self, asked: _Reload) -> None:
        """Applies a delta to the served version, after checking it."""
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
        """Yields the engine's parameters for writing. Afterwards they have `label`, or no version if writing failed."""
        version = self._version + 1
        self._engine.begin_update()
        self._labels[version] = NO_VERSION
        try:
            yield self._engine.incoming(0)
            self._labels[version] = label
        finally:
            self._engine.end_update(version)
            self._version = version
