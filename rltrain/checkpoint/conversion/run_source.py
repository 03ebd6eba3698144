"""The actor's weights in a checkpoint of a run, as canonical tensors."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from rltrain.checkpoint.conversion.element_type import CHOICES
from rltrain.checkpoint.conversion.sources import HfSource
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.run.files import find_damage, read_manifest
from rltrain.checkpoint.run.folder import Resumed, checkpoint_at
from rltrain.checkpoint.run.saved_state import MASTER, SavedState
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, named_by
from rltrain.models import canonical_tensors, element_types, read_architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.lora import PEFT_PREFIX, WEIGHT, A, B
from rltrain.models.table import ElementType

ROLE = "actor"


class RunSource:
    """The weights of the actor in a checkpoint of a run, in the type that it is trained in: master weights rounded
    once, as engines and exports get them. Low-rank adapters are merged into the checkpoint that they were trained on.

    `path` is the checkpoint's folder or one of several, of which the newest is taken; `settings` is the folder with
    config.json and the tokenizer, by default that of the model which the run began with. Of the files' checksums those
    of every `share[1]`-th file from number `share[0]` are compared, so that processes can share them out.
    CheckpointError where files are missing or damaged, or are of another model.
    """

    def __init__(
        self, path: Path, option: str, settings: Path | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.path, self.option = path, option
        self.checkpoint = checkpoint_at(path, option)
        _refuse_damage(self.checkpoint, option, *share)
        config = _config_of(self.checkpoint, option)
        self.settings, named = (settings, "--hf-config") if settings else (_began_with(config, option), option)
        self.architecture = read_architecture(self.settings, named)
        if config.model.mtp:
            self.architecture = self.architecture.predicting()
        self.tensors = canonical_tensors(self.architecture)
        in_fp32 = element_types(self.architecture, config.model.dtype) == ElementType.FLOAT32
        trained_in = CHOICES[config.model.dtype]
        self.dtypes: Sequence[torch.dtype] = [torch.float32 if always else trained_in for always in in_fp32.tolist()]
        lora, trained = config.model.lora, self.architecture
        if lora:
            trained = trained.adapted(lora.rank, lora.targets)
        self._base = HfSource(self.settings, named) if lora else None
        self._scale = lora.scale if lora else 1.0
        self._saved = SavedState(self.checkpoint.files(ROLE), canonical_tensors(trained), option)

    def read(self, box: Box) -> Tensor:
        if self._base is None:
            values = self._saved.read_box(MASTER, box)
        else:
            values = self._merged(self._base.read(box).float(), box)
        return values.to(self.dtypes[box.tensor])

    def _merged(self, weight: Tensor, box: Box) -> Tensor:
        """`weight` with what the tensor's adapter adds to the box, if there is one."""
        adapters, name = self._saved.tensors, PEFT_PREFIX + self.tensors.names[box.tensor].removesuffix(WEIGHT)
        if name + A not in adapters.numbers:
            return weight
        a, b = adapters.numbers[name + A], adapters.numbers[name + B]
        rank, _ = adapters.shapes[a]
        left = self._saved.read_box(MASTER, Box(b, box.row, 0, box.rows, rank))
        right = self._saved.read_box(MASTER, Box(a, 0, box.col, rank, box.cols))
        return torch.addmm(weight, left, right, alpha=self._scale)


def _refuse_damage(checkpoint: Resumed, option: str, first: int, step: int) -> None:
    manifest = read_manifest(checkpoint.folder)
    names = sorted(name for name in manifest if name.startswith(f"{ROLE}/"))[first::step]
    if damage := find_damage(checkpoint.folder, manifest, names, lambda: None):
        raise CheckpointError(f"{damage} ({named_by(option)})")


def _config_of(checkpoint: Resumed, option: str) -> Config:
    try:
        return Config.model_validate_json(json.dumps(checkpoint.run["config"]))
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} was saved by another version of rltrain: {error} ({named_by(option)})"
        ) from None


def _began_with(config: Config, option: str) -> Path:
    path = Path(config.checkpoint_of(ROLE)[0])
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"the run began with the model {path}, which has no {CONFIG_FILE} here; name the folder of a Hugging Face "
            f"checkpoint of that model with --hf-config ({named_by(option)})"
        )
    return path
