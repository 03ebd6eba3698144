"""Models under fully_shard on test ranks: tiny vision-language models and their gradients."""

from pathlib import Path
from typing import Any

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import torch
import torch.distributed as dist

from rltrain.algorithms.losses import LossFunction
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.data.experience import Experience
from rltrain.models import Architecture, read_architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import begin_adapters
from rltrain.training.fsdp_backend import ShardedTrainableModel
from rltrain.training.fsdp_model import ShardedModel, local_shards
from rltrain.training.tower_pass import OnImages, Sight
from tests.support.tolerances import ADAM_EPS
from tests.support.trained_models import CPU
from tests.support.vision_samples import MEAN, STD

SMALLEST_LARGEST = 1e-3
"""Gradients are compared relative to their largest element, but at least to this."""


def seeing_in_training(
    folder: Path,
    grid: Grid,
    groups: ProcessGroups,
    store: ImageStore,
    *,
    max_tokens: int,
    vision: schema.VisionSettings | None = None,
    architecture: Architecture | None = None,
    role: str = "actor",
    lora: Lora | None = None,
    keep_gathered: bool = False,
    on_images: OnImages | None = None,
    is_constant: bool = False,
    **settings: Any,
) -> ShardedTrainableModel:
    """Returns the model of a checkpoint with its vision tower and an optimizer. `settings` are keys of the section
    model."""
    model = ShardedModel(
        architecture or read_architecture(folder, sees=True),
        grid,
        groups,
        folder=folder,
        model=schema.Model(**{"path": str(folder), "dtype": "float32"} | settings),
        fsdp=schema.Fsdp(reshard_after_forward=not keep_gathered),
        device=CPU,
        trains=lora is None,
        lora=lora,
        sight=Sight(folder, MEAN, STD, vision or schema.VisionSettings(), store, on_images, is_constant),
    )
    load_parameters(folder, model.layout, dist.get_rank(), dict(model.weights))
    if lora:
        begin_adapters(model.learned_layout, dist.get_rank(), model.learned, lora, 0)
    return _in_training(model, max_tokens, role)


def reading_in_training(
    folder: Path, grid: Grid, groups: ProcessGroups, *, max_tokens: int = 1, **settings_of_model: Any
) -> ShardedTrainableModel:
    """Returns the language model of a checkpoint without its vision tower."""
    settings, fsdp = schema.Model(path=str(folder), dtype="float32", **settings_of_model), schema.Fsdp()
    architecture = read_architecture(folder)
    model = ShardedModel(architecture, grid, groups, folder=folder, model=settings, fsdp=fsdp, device=CPU, trains=True)
    load_parameters(folder, model.layout, dist.get_rank(), dict(model.weights))
    return _in_training(model, max_tokens, "actor")


def _in_training(model: ShardedModel, max_tokens: int, role: str) -> ShardedTrainableModel:
    optimizer = schema.Optimizer(lr=1e-2, weight_decay=0, eps=ADAM_EPS)
    own = schema.Actor(backend="fsdp", optimizer=optimizer, micro_batch_tokens=max_tokens)
    return ShardedTrainableModel(model, own, total_updates=1, role=role, max_skipped=0)


def shard_differences(
    model: ShardedTrainableModel, folder: Path, samples: Experience, loss: LossFunction
) -> dict[str, float]:
    """Returns the largest difference of this rank's summed gradients from a checkpoint's, relative to the largest
    element there. Parameters without a gradient differ by infinity."""
    weights = model.model.weights
    expected = {name: torch.zeros_like(parameter) for name, parameter in weights.items()}
    load_parameters(folder, model.model.layout, dist.get_rank(), expected)
    model.accumulate(samples, loss)
    named = model.model.named_learned()
    held = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    found = local_shards(held)
    return {
        name: float((found[name] - one).abs().max() / one.abs().max().clamp(min=SMALLEST_LARGEST))
        if name in found
        else float("inf")
        for name, one in expected.items()
    }
