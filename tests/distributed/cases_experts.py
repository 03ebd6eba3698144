"""What ranks do in test_experts: models with experts in many parallel layouts inside one world of four ranks."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file
from torch import Tensor

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import read_architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import ROUTER_BIAS, LanguageModel, build_model, local_parameters
from tests.support.family_checkpoints import LENGTHS
from tests.support.tolerances import ADAM_EPS

ALL = (0, 1, 2, 3)
NUM_STEPS = 2
MAX_TOKENS = 80
EXPORTED = "tp2_ep2"
HALF = ("deepseek_v3/pp2_ep2", "mixtral/tp2_ep2_plain")
"""What is trained in float16 as well, in layouts of all ranks."""
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
    """By checkpoint and layout: how it differs from transformers at first, what some optimizer steps report, and the
    biases and log-probs after them. A model trained in layout EXPORTED is written to folder/name/trained."""
    grids = {LAYOUTS[layout].grid for layouts in checkpoints.values() for layout in layouts}
    lists = sorted({ranks for grid in grids for ranks in group_lists({"actor": grid})})
    groups = ProcessGroups(lists, backend="gloo", timeout_s=60)
    results: dict[str, Any] = {}
    for name, layouts in checkpoints.items():
        for layout in layouts:
            if dist.get_rank() in LAYOUTS[layout].grid.ranks:
                results[f"{name}/{layout}"] = _train(Path(folder, name), layout, groups, moe)
            if f"{name}/{layout}" in HALF:
                results[f"{name}/{layout}/float16"] = _overflow(Path(folder, name), layout, groups, moe)
    return results


def _overflow(path: Path, name: str, groups: ProcessGroups, moe: dict[str, float]) -> dict[str, Any]:
    """In float16 from a loss scale that is too large for gradients: what steps report, and the biases around them."""
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
        differences = relative_differences(make_trained(path, layout, groups, {}), path / "gradients", experience)
    model = make_trained(path, layout, groups, moe)
    biases = [_biases(model)]
    steps = []
    for _ in range(NUM_STEPS):
        steps.append(model.train_batch(experience, likelihood_loss()))
        biases.append(_biases(model))
    after = model.evaluate(experience, max_tokens=MAX_TOKENS)
    if name == EXPORTED:
        everyone = groups[layout.grid.ranks]
        save_checkpoint(
            path / "trained",
            model.parameters,
            model.layout,
            model.model.architecture,
            group=everyone,
            rank=dist.get_rank(),
            like=path,
        )
    of_samples = [values.tolist() for values in after.split(experience.lengths.tolist())]
    return {
        "differences": differences,
        "steps": steps,
        "biases": biases,
        "after": dict(zip(experience.sample_ids.tolist(), of_samples, strict=True)),
    }


def _biases(model: TrainableModel) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.parameters.items() if name.endswith(ROUTER_BIAS)}


def relative_differences(model: TrainableModel, gradients: Path, experience: Experience) -> dict[str, float]:
    """The largest difference of each parameter's gradient from that in a checkpoint, over the largest element there."""
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.parameters.items()}
    load_parameters(gradients, model.layout, dist.get_rank(), expected)
    model.accumulate(experience, likelihood_loss())
    model.reduction.begin_rest()
    finalize_model_grads(model.chunks, None, pg_collection=model.groups)
    divisor = float(response_mask().sum())
    return {
        name: _relative_difference(parameter.main_grad / divisor, expected[name])
        for name, parameter in model.model.chunks[0].named_parameters()
    }


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def build(
    path: Path, layout: Layout, groups: ProcessGroups, moe: dict[str, float], dtype: str = "float32"
) -> LanguageModel:
    grid, architecture = layout.grid, read_architecture(path)
    model = build_model(
        architecture,
        grid,
        groups,
        model=schema.Model(
            path=str(path),
            dtype=dtype,  # type: ignore[arg-type]
            recompute=layout.recompute,  # type: ignore[arg-type]
            cp_communication="all_to_all" if layout.by_heads else "auto",
            moe=schema.MoE(**moe, dispatcher=layout.dispatcher),  # type: ignore[arg-type]
            fake_quantization=layout.rounded,
        ),
        parallel=schema.Parallel(
            tp=grid.tp,
            pp=grid.pp,
            cp=grid.cp,
            ep=grid.ep,
            etp=grid.etp,
            sequence_parallel=layout.sequence_parallel,
        ),
        device=torch.device("cpu"),
    )
    load_parameters(path, model.layout, dist.get_rank(), local_parameters(model))
    return model


def make_trained(
    path: Path,
    layout: Layout,
    groups: ProcessGroups,
    moe: dict[str, float],
    dtype: str = "float32",
    loss_scale: schema.LossScale | None = None,
) -> TrainableModel:
    model = build(path, layout, groups, moe, dtype)
    settings = schema.Actor(
        optimizer=schema.Optimizer(
            lr=1e-3, weight_decay=0.1, eps=ADAM_EPS, loss_scale=loss_scale or schema.LossScale()
        ),
        micro_batch_tokens=MAX_TOKENS,
        distributed_optimizer=layout.distributed,
        overlap=layout.overlap,
        gradient_bucket_mb=0.02 if layout.overlap else None,
    )
    return TrainableModel(model, settings, total_updates=NUM_STEPS)


def share_of(path: Path, grid: Grid) -> Experience:
    """Of this rank's replica: the last of several has no samples at all."""
    count, tokens = torch.arange(len(LENGTHS)), load_file(path / "expected.safetensors")["tokens"]
    whole = Experience(
        sample_ids=count,
        group_ids=count,
        prompt_ids=count,
        lengths=torch.tensor(LENGTHS),
        tokens=tokens,
        response_mask=response_mask(),
    )
    with_samples = max(grid.dp - 1, 1)
    at = grid.coordinates(dist.get_rank()).dp
    return whole.select(count[count % with_samples == at])


def response_mask() -> Tensor:
    """All but the first three tokens of a sample."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return positions >= 3
