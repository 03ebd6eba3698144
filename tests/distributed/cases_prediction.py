"""What ranks do in test_prediction: a model whose layer predicts a further token, in several layouts."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import save_file
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
from rltrain.training.megatron.model import build_model, local_parameters
from tests.support.prediction_checkpoints import COEF, experience
from tests.support.tolerances import ADAM_EPS

ALL = (0, 1, 2, 3)
NUM_STEPS, MAX_TOKENS = 2, 40


@dataclass(frozen=True)
class Layout:
    grid: Grid
    sequence_parallel: bool = False
    overlap: bool = False
    logits_chunk_tokens: int | None = None
    recompute: Any = "none"


LAYOUTS = {
    "one_rank": Layout(Grid((0,))),
    "chunked_logits": Layout(Grid((1,)), logits_chunk_tokens=7, recompute="full"),
    "tp2": Layout(Grid((0, 1), tp=2)),
    "tp2_sequence_parallel": Layout(Grid((2, 3), tp=2), sequence_parallel=True, logits_chunk_tokens=16),
    "pp2": Layout(Grid((1, 2), pp=2)),
    "cp2": Layout(Grid((0, 3), cp=2)),
    "tp2_pp2": Layout(Grid(ALL, tp=2, pp=2), sequence_parallel=True),
    "pp2_vpp2": Layout(Grid((2, 3), pp=2, vpp=2, layers_per_stage=(1, 0, 1, 0))),
    "pp2_dp2_overlap": Layout(Grid(ALL, pp=2), overlap=True),
    "tp2_cp2": Layout(Grid(ALL, tp=2, cp=2)),
}
OF_FAMILIES = {
    "one_rank": Layout(Grid((0,))),
    "tp2_ep2": Layout(Grid((1, 2), tp=2, ep=2, etp=1)),
    "pp2_ep2": Layout(Grid(ALL, pp=2, ep=2)),
    "pp2": Layout(Grid((1, 3), pp=2)),
}
WAYS = ("layer", "head", "model")
SAVED_IN, RESUMED_IN = "pp2", "one_rank"


def trained(path: str, gradients: dict[str, str]) -> dict[str, Any]:
    """By layout, of those in which this rank has a part, and by what the loss trains."""
    lists = sorted({ranks for layout in LAYOUTS.values() for ranks in group_lists({"actor": layout.grid})})
    groups = ProcessGroups(lists, backend="gloo", timeout_s=60)
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        if dist.get_rank() in LAYOUTS[name].grid.ranks:
            results[name] = {
                way: _train(Path(path), name, groups, Path(folder), way) for way, folder in gradients.items()
            }
    dist.barrier()
    if dist.get_rank() in LAYOUTS[RESUMED_IN].grid.ranks:
        results["resumed"] = _resumed(Path(path), groups)
        results["gradients"] = _gradients(Path(path), groups)
    return results


def families(folder: str, layouts: dict[str, list[str]]) -> dict[str, Any]:
    """By family and layout, of those in which this rank has a part. All of a model learns."""
    grids = {OF_FAMILIES[name].grid for names in layouts.values() for name in names}
    lists = sorted({ranks for grid in grids for ranks in group_lists({"actor": grid})})
    groups = ProcessGroups(lists, backend="gloo", timeout_s=60)
    results: dict[str, Any] = {}
    for family, names in layouts.items():
        for name in names:
            layout, path = OF_FAMILIES[name], Path(folder, family)
            if dist.get_rank() not in layout.grid.ranks:
                continue
            model = make_model(path, layout, groups, "model", distributed=False)
            differences = {}
            if layout.grid.dp == 1:
                differences = _differences(model, path / "gradients", experience())
            model = make_model(path, layout, groups, "model")
            steps = [model.train_batch(_share(layout.grid), likelihood_loss()) for _ in range(NUM_STEPS)]
            results[f"{family}/{name}"] = {"differences": differences, "steps": steps}
    return results


def make_model(
    path: Path, layout: Layout, groups: ProcessGroups, trains: Any, *, distributed: bool = True, predicts: bool = True
) -> TrainableModel:
    grid = layout.grid
    model = build_model(
        replace(read_architecture(path), predicts=predicts),
        grid,
        groups,
        model=schema.Model(
            path=str(path),
            dtype="float32",
            mtp=schema.Mtp(coef=COEF, trains=trains),
            logits_chunk_tokens=layout.logits_chunk_tokens,
            recompute=layout.recompute,
        ),
        parallel=schema.Parallel(
            tp=grid.tp, pp=grid.pp, cp=grid.cp, ep=grid.ep, etp=grid.etp, sequence_parallel=layout.sequence_parallel
        ),
        device=torch.device("cpu"),
    )
    load_parameters(path, model.layout, dist.get_rank(), local_parameters(model))
    settings = schema.Actor(
        optimizer=schema.Optimizer(lr=1e-2, eps=ADAM_EPS, clip_grad=0.5),
        micro_batch_tokens=MAX_TOKENS,
        distributed_optimizer=distributed,
        overlap=layout.overlap and distributed,
    )
    return TrainableModel(model, settings, total_updates=NUM_STEPS + 1)


def _train(path: Path, name: str, groups: ProcessGroups, gradients: Path, way: str) -> dict[str, Any]:
    grid = LAYOUTS[name].grid
    plain = make_model(path, LAYOUTS[name], groups, way, distributed=False)
    differences = _differences(plain, gradients, _share(grid)) if grid.dp == 1 else {}
    model = make_model(path, LAYOUTS[name], groups, way)
    samples, everyone = _share(grid), groups[grid.ranks]
    steps = [model.train_batch(samples, likelihood_loss()) for _ in range(NUM_STEPS)]
    if name == SAVED_IN:
        contents = model.save_state()
        save_file(dict(contents.tensors), path / f"state_{way}_{dist.get_rank()}", metadata=dict(contents.metadata))
    save_checkpoint(
        path / way / name,
        model.parameters,
        model.layout,
        model.model.architecture,
        group=everyone,
        rank=dist.get_rank(),
        like=path,
    )
    after = model.train_batch(samples, likelihood_loss())
    return {"differences": differences, "steps": steps, "after": after}


def _resumed(path: Path, groups: ProcessGroups) -> dict[str, Any]:
    """What the step reports that follows those of SAVED_IN, in another layout."""
    found = {}
    for way in WAYS:
        model = make_model(path, LAYOUTS[RESUMED_IN], groups, way)
        model.load_state(sorted(path.glob(f"state_{way}_*")))
        found[way] = model.train_batch(_share(LAYOUTS[RESUMED_IN].grid), likelihood_loss())
    return found


def _gradients(path: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Of all samples on one rank, without the layer and with it."""
    found = {}
    for way in ("without", *WAYS):
        predicts = way in WAYS
        trains = way if predicts else "layer"
        model = make_model(path, LAYOUTS[RESUMED_IN], groups, trains, distributed=False, predicts=predicts)
        model.accumulate(experience(), likelihood_loss())
        found[way] = {name: one.main_grad.tolist() for name, one in model.parameters.items()}  # type: ignore[attr-defined]
    return found


def _share(grid: Grid) -> Experience:
    """Of this rank's replica: the last of several has no samples."""
    whole = experience()
    with_samples = max(grid.dp - 1, 1)
    count = torch.arange(whole.num_samples)
    return whole.select(count[count % with_samples == grid.coordinates(dist.get_rank()).dp])


def _differences(model: TrainableModel, gradients: Path, samples: Experience) -> dict[str, float]:
    """The largest difference of each parameter's gradient from that in a checkpoint, over the largest element there."""
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.parameters.items()}
    load_parameters(gradients, model.layout, dist.get_rank(), expected)
    model.accumulate(samples, likelihood_loss())
    finalize_model_grads(model.chunks, None, pg_collection=model.groups)
    model.model.sum_gradients_of_copies()
    divisor = float(samples.response_mask.sum())
    return {
        name: _difference(parameter.main_grad / divisor, expected[name])  # type: ignore[attr-defined]
        for name, parameter in model.parameters.items()
        if hasattr(parameter, "main_grad")  # which a router's bias has not
    }


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
