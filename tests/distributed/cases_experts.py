"""The ranks of test_experts: models with experts in many parallel layouts, in one world of four ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import ROUTER_BIAS, LanguageModel
from tests.support.family_checkpoints import LENGTHS
from tests.support.packed_experience import plain_experience
from tests.support.trained_models import (
    by_sample,
    gradient_differences,
    groups_on,
    in_training,
    megatron_model,
    of_replicas_but_one,
)

ALL = (0, 1, 2, 3)
NUM_STEPS = 2
MAX_TOKENS = 80
EXPORTED = "tp2_ep2"
HALF = ("deepseek_v3/pp2_ep2", "mixtral/tp2_ep2_plain")
"""Cases trained in float16 as well, in layouts of all ranks."""
TOO_LARGE = schema.LossScale(initial=2.0**17)


@dataclass(frozen=True)
class Layout:
    grid: Grid
    distributed: bool = True
    dispatcher: str = "alltoall"
    overlap: bool = False
    recompute: str = "none"
    by_heads: bool = False
    sequence_parallel: bool = False
    rounded: schema.FakeQuantization | None = None


LAYOUTS = {
    "one_rank": Layout(Grid((0,)), distributed=False),
    "tp2": Layout(Grid((0, 1), tp=2)),
    "tp2_plain": Layout(Grid((0, 1), tp=2), distributed=False),
    "ep2_allgather": Layout(Grid((0, 1), ep=2), dispatcher="allgather"),
    "tp2_etp1": Layout(Grid((0, 1), tp=2, etp=1)),
    "etp2": Layout(Grid((0, 1), etp=2)),
    "tp2_ep2": Layout(Grid(ALL, tp=2, ep=2)),
    "tp2_ep2_plain": Layout(Grid(ALL, tp=2, ep=2), distributed=False),
    "pp4": Layout(Grid(ALL, pp=4)),
    "tp2_dp2_etp1": Layout(Grid(ALL, tp=2, etp=1)),
    "tp2_pp2_ep2_etp1": Layout(Grid(ALL, tp=2, pp=2, ep=2, etp=1)),
    "pp2_ep2": Layout(Grid(ALL, pp=2, ep=2)),
    "pp2_ep2_allgather": Layout(Grid(ALL, pp=2, ep=2), dispatcher="allgather"),
    "ep2_dp4_overlap": Layout(Grid(ALL, ep=2), overlap=True),
    "ep4_recomputed": Layout(Grid(ALL, ep=4), recompute="full"),
    "cp2": Layout(Grid((0, 1), cp=2)),
    "cp2_ep2": Layout(Grid((0, 1), cp=2, ep=2)),
    "cp4_by_heads": Layout(Grid(ALL, cp=4), by_heads=True),
    "cp4_ep4": Layout(Grid(ALL, cp=4, ep=4), distributed=False),
    "cp2_ep4": Layout(Grid(ALL, cp=2, ep=4), overlap=True),
    "cp2_ep4_allgather": Layout(Grid(ALL, cp=2, ep=4), dispatcher="allgather"),
    "cp2_etp2": Layout(Grid(ALL, cp=2, etp=2), recompute="full"),
    "tp2_cp2_ep2_etp1": Layout(Grid(ALL, tp=2, cp=2, ep=2, etp=1), by_heads=True),
    "tp2_cp2_ep2": Layout(Grid(ALL, tp=2, cp=2, ep=2)),
    "pp2_cp2_ep2": Layout(Grid(ALL, pp=2, cp=2, ep=2), recompute="selective"),
    "tp2_sequence_parallel": Layout(Grid((0, 1), tp=2), sequence_parallel=True),
    "recomputed": Layout(Grid((0,)), recompute="full"),
}


def trained(checkpoints: dict[str, list[str]], folder: str, moe: dict[str, float]) -> dict[str, Any]:
    """Returns by checkpoint and layout: differences from transformers, reports of some steps, and final biases and
    log-probs.

    A model trained in layout EXPORTED is written to folder/name/trained.
    """
    groups = groups_on(LAYOUTS[layout].grid for layouts in checkpoints.values() for layout in layouts)
    results: dict[str, Any] = {}
    for name, layouts in checkpoints.items():
        for layout in layouts:
            if dist.get_rank() in LAYOUTS[layout].grid.ranks:
                results[f"{name}/{layout}"] = _train(Path(folder, name), layout, groups, moe)
            if f"{name}/{layout}" in HALF:
                results[f"{name}/{layout}/float16"] = _overflow(Path(folder, name), layout, groups, moe)
    return results


def _overflow(path: Path, name: str, groups: ProcessGroups, moe: dict[str, float]) -> dict[str, Any]:
    """Trains in float16 from a loss scale too large for gradients. Returns reports of steps and the changes of
    biases."""
    model = make_trained(path, LAYOUTS[name], groups, moe, dtype="float16", loss_scale=TOO_LARGE)
    before, experience = _biases(model), share_of(path, LAYOUTS[name].grid)
    steps = [model.train_batch(experience, likelihood_loss())]
    kept = _biases(model) == before
    while steps[-1]["overflowed_updates"]:
        steps.append(model.train_batch(experience, likelihood_loss()))
    return {"steps": steps, "biases_kept": kept, "biases_moved": _biases(model) != before}


def _train(path: Path, name: str, groups: ProcessGroups, moe: dict[str, float]) -> dict[str, Any]:
    layout = LAYOUTS[name]
    experience, differences = share_of(path, layout.grid), {}
    if not layout.distributed:
        differences = differences_from(path / "gradients", make_trained(path, layout, groups, {}), experience)
    model = make_trained(path, layout, groups, moe)
    biases = [_biases(model)]
    steps = []
    for _ in range(NUM_STEPS):
        steps.append(model.train_batch(experience, likelihood_loss()))
        biases.append(_biases(model))
    after = model.evaluate(experience, max_tokens=MAX_TOKENS)
    if name == EXPORTED:
        places = {"group": groups[layout.grid.ranks], "rank": dist.get_rank(), "like": path}
        save_checkpoint(path / "trained", model.parameters, model.layout, model.model.architecture, **places)
    return {"differences": differences, "steps": steps, "biases": biases, "after": by_sample(after, experience)}


def _biases(model: TrainableModel) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.parameters.items() if name.endswith(ROUTER_BIAS)}


def differences_from(gradients: Path, model: TrainableModel, samples: Experience) -> dict[str, float]:
    return gradient_differences(model, gradients, samples, likelihood_loss(), int(response_mask().sum()))


def build(
    path: Path, layout: Layout, groups: ProcessGroups, moe: dict[str, float], dtype: str = "float32"
) -> LanguageModel:
    return megatron_model(
        path,
        layout.grid,
        groups,
        sequence_parallel=layout.sequence_parallel,
        dtype=dtype,
        recompute=layout.recompute,
        cp_communication="all_to_all" if layout.by_heads else "auto",
        moe=schema.MoE(**moe, dispatcher=layout.dispatcher),
        fake_quantization=layout.rounded,
    )


def make_trained(
    path: Path,
    layout: Layout,
    groups: ProcessGroups,
    moe: dict[str, float],
    dtype: str = "float32",
    loss_scale: schema.LossScale | None = None,
) -> TrainableModel:
    return in_training(
        build(path, layout, groups, moe, dtype),
        updates=NUM_STEPS,
        max_tokens=MAX_TOKENS,
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "loss_scale": loss_scale or schema.LossScale()},
        distributed_optimizer=layout.distributed,
        overlap=layout.overlap,
        gradient_bucket_mb=0.02 if layout.overlap else None,
    )


def share_of(path: Path, grid: Grid) -> Experience:
    """Returns the samples of this rank's replica. The last of several replicas has none."""
    tokens = load_file(path / "expected.safetensors")["tokens"]
    return of_replicas_but_one(plain_experience(LENGTHS, tokens, response_mask()), grid)


def response_mask() -> Tensor:
    """Returns a mask of all but the first three tokens of each sample."""
    return torch.cat([torch.arange(length) for length in LENGTHS]) >= 3
