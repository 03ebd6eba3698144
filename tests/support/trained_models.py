"""Models in training on test ranks: process groups, weights, optimizers, gradients and samples."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.algorithms.losses import LossFunction
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture, read_architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import LanguageModel, build_model, local_parameters
from rltrain.training.tower_pass import Sight
from rltrain.training.trainable import TrainedModel
from tests.support.tolerances import ADAM_EPS

CPU = torch.device("cpu")


def groups_on(grids: Iterable[Grid], backend: str = "gloo") -> ProcessGroups:
    """Returns the process groups of an actor on each of these grids."""
    lists = {ranks for grid in grids for ranks in group_lists({"actor": grid})}
    return ProcessGroups(sorted(lists), backend=backend, timeout_s=60)


def blank_model(
    path: Path,
    grid: Grid,
    groups: ProcessGroups,
    *,
    architecture: Architecture | None = None,
    sequence_parallel: bool = False,
    device: torch.device = CPU,
    sight: Sight | None = None,
    **settings: Any,
) -> LanguageModel:
    """Returns Megatron's model of a checkpoint without its weights. `settings` are keys of the section model."""
    return build_model(
        architecture or read_architecture(path),
        grid,
        groups,
        model=schema.Model(**{"path": str(path), "dtype": "float32"} | settings),
        parallel=schema.Parallel(sequence_parallel=sequence_parallel),
        device=device,
        sight=sight,
    )


def megatron_model(path: Path, grid: Grid, groups: ProcessGroups, **settings: Any) -> LanguageModel:
    """Returns the model of `blank_model` with the checkpoint's weights."""
    model = blank_model(path, grid, groups, **settings)
    load_parameters(path, model.layout, dist.get_rank(), local_parameters(model))
    return model


def in_training(
    model: LanguageModel,
    *,
    updates: int,
    max_tokens: int,
    optimizer: dict[str, Any],
    role: str = "actor",
    max_skipped: int = 0,
    max_ratio: float | None = None,
    **settings: Any,
) -> TrainableModel:
    """Returns the model with an optimizer of eps ADAM_EPS. `settings` are further keys of the section actor."""
    own = {"optimizer": {"eps": ADAM_EPS, **optimizer}, "micro_batch_tokens": max_tokens, **settings}
    limits: dict[str, Any] = {"max_skipped": max_skipped, "max_ratio": max_ratio}
    return TrainableModel(model, schema.Actor(**own), total_updates=updates, role=role, **limits)


def summed_gradients(model: TrainableModel, samples: Experience, loss: LossFunction) -> dict[str, Tensor]:
    """Returns the gradients of this rank's trained parameters, by name, summed over all tokens of all replicas."""
    model.accumulate(samples, loss)
    model.reduction.begin_rest()
    finalize_model_grads(model.wrapped, None, pg_collection=model.groups)
    model.model.sum_gradients_of_copies()
    if model.model.adapters:
        model.model.adapters.sum_gradients_of_experts()
    trained = model.adapted.parameters if model.adapted else model.parameters
    return {name: one.main_grad for name, one in trained.items() if hasattr(one, "main_grad")}


def gradient_differences(
    model: TrainableModel, folder: Path, samples: Experience, loss: LossFunction, num_tokens: int
) -> dict[str, float]:
    """Returns the largest difference of mean gradients from a checkpoint's, relative to the largest element there."""
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.parameters.items()}
    load_parameters(folder, model.layout, dist.get_rank(), expected)
    found = summed_gradients(model, samples, loss)
    return {
        name: float((one / num_tokens - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3))
        for name, one in found.items()
    }


def load_experience(path: Path) -> Experience:
    """Returns the samples stored next to a test checkpoint."""
    columns = load_file(path / "experience.safetensors")
    return Experience(**{**columns, "sample_ids": torch.arange(len(columns["lengths"]))})


def of_replica(samples: Experience, grid: Grid) -> Experience:
    """Returns the share of this rank's replica: every dp-th sample."""
    dp = grid.coordinates(dist.get_rank()).dp
    return samples.select(torch.arange(samples.num_samples)[dp :: grid.dp])


def of_replicas_but_one(samples: Experience, grid: Grid) -> Experience:
    """Returns the share of this rank's replica. The last of several replicas has no samples."""
    count = torch.arange(samples.num_samples)
    return samples.select(count[count % max(grid.dp - 1, 1) == grid.coordinates(dist.get_rank()).dp])


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a hash of the bits of the tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy() pins a storage
    return total.hexdigest()


def by_sample(values: Tensor, samples: Experience) -> dict[int, list[float]]:
    """Returns the values of tokens by the id of their sample."""
    of_samples = [one.tolist() for one in values.split(samples.lengths.tolist())]
    return dict(zip(samples.sample_ids.tolist(), of_samples, strict=True))


def send_away(model: TrainedModel) -> None:
    """Moves all memory of a model in training off the device. Gradients are dropped."""
    for name, part in model.parts.items():
        if name != "gradients":
            part.save()
        part.leave(drop=name == "gradients")


def write_state(model: TrainedModel, file: Path) -> None:
    """Saves this rank's share of a training state."""
    state = model.save_state()
    save_file(dict(state.tensors), file, metadata=dict(state.metadata))
