"""The ranks of test_prediction: a model with a layer that predicts a further token, in several layouts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.config import schema
from rltrain.models import read_architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from tests.support.prediction_checkpoints import COEF, experience
from tests.support.trained_models import (
    gradient_differences,
    groups_on,
    in_training,
    megatron_model,
    of_replicas_but_one,
    write_state,
)

ALL = (0, 1, 2, 3)
NUM_STEPS, MAX_TOKENS = 2, 40


@dataclass(frozen=True)
class Layout:
    grid: Grid
    sequence_parallel: bool = False
    overlap: bool = False
    recompute: Any = "none"


LAYOUTS = {
    "one_rank": Layout(Grid((0,))),
    "recomputed": Layout(Grid((1,)), recompute="full"),
    "tp2": Layout(Grid((0, 1), tp=2)),
    "tp2_sequence_parallel": Layout(Grid((2, 3), tp=2), sequence_parallel=True),
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
QUICK_LAYOUT = Layout(Grid((0, 1), pp=2))
WAYS = ("layer", "head", "model")
SAVED_IN, RESUMED_IN = "pp2", "one_rank"


def trained(path: str, gradients: dict[str, str]) -> dict[str, Any]:
    """Returns this rank's results by layout and by the parts trained by the loss."""
    groups = groups_on(layout.grid for layout in LAYOUTS.values())
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        if dist.get_rank() in LAYOUTS[name].grid.ranks:
            results[name] = {
                way: _train_and_save(Path(path), name, groups, Path(folder), way) for way, folder in gradients.items()
            }
    dist.barrier()
    if dist.get_rank() in LAYOUTS[RESUMED_IN].grid.ranks:
        results["resumed"] = _resumed(Path(path), groups)
        results["gradients"] = _gradients(Path(path), groups)
    return results


def in_two_stages(path: str, gradients: str) -> dict[str, Any]:
    """Returns this rank's results in QUICK_LAYOUT. All parts of the model learn."""
    return _train(Path(path), QUICK_LAYOUT, groups_on([QUICK_LAYOUT.grid]), Path(gradients), "model")[1]


def families(folder: str, layouts: dict[str, list[str]]) -> dict[str, Any]:
    """Returns this rank's results by family and layout. All parts of a model learn."""
    groups = groups_on(OF_FAMILIES[name].grid for names in layouts.values() for name in names)
    results: dict[str, Any] = {}
    for family, names in layouts.items():
        for name in names:
            layout, path = OF_FAMILIES[name], Path(folder, family)
            if dist.get_rank() not in layout.grid.ranks:
                continue
            results[f"{family}/{name}"] = _train(path, layout, groups, path / "gradients", "model")[1]
    return results


def make_model(
    path: Path, layout: Layout, groups: ProcessGroups, trains: Any, *, distributed: bool = True, predicts: bool = True
) -> TrainableModel:
    model = megatron_model(
        path,
        layout.grid,
        groups,
        architecture=replace(read_architecture(path), predicts=predicts),
        sequence_parallel=layout.sequence_parallel,
        mtp=schema.Mtp(coef=COEF, trains=trains),
        recompute=layout.recompute,
    )
    return in_training(
        model,
        updates=NUM_STEPS + 1,
        max_tokens=MAX_TOKENS,
        optimizer={"lr": 1e-2, "clip_grad": 0.5},
        distributed_optimizer=distributed,
        overlap=layout.overlap and distributed,
    )


def _train(
    path: Path, layout: Layout, groups: ProcessGroups, gradients: Path, way: str
) -> tuple[TrainableModel, dict[str, Any]]:
    samples, differences = of_replicas_but_one(experience(), layout.grid), {}
    plain = make_model(path, layout, groups, way, distributed=False)
    if layout.grid.dp == 1:
        num_tokens = int(samples.response_mask.sum())
        differences = gradient_differences(plain, gradients, samples, likelihood_loss(), num_tokens)
    model = make_model(path, layout, groups, way)
    steps = [model.train_batch(samples, likelihood_loss()) for _ in range(NUM_STEPS)]
    return model, {"differences": differences, "steps": steps}


def _train_and_save(path: Path, name: str, groups: ProcessGroups, gradients: Path, way: str) -> dict[str, Any]:
    grid = LAYOUTS[name].grid
    model, report = _train(path, LAYOUTS[name], groups, gradients, way)
    if name == SAVED_IN:
        write_state(model, path / f"state_{way}_{dist.get_rank()}")
    places = {"group": groups[grid.ranks], "rank": dist.get_rank(), "like": path}
    save_checkpoint(path / way / name, model.parameters, model.layout, model.model.architecture, **places)
    after = model.train_batch(of_replicas_but_one(experience(), grid), likelihood_loss())
    return {**report, "after": after}


def _resumed(path: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Returns the report of the next step after those of SAVED_IN, in another layout."""
    found = {}
    for way in WAYS:
        model = make_model(path, LAYOUTS[RESUMED_IN], groups, way)
        model.load_state(sorted(path.glob(f"state_{way}_*")))
        found[way] = model.train_batch(experience(), likelihood_loss())
    return found


def _gradients(path: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Returns the gradients of all samples on one rank, without the layer and with it."""
    found = {}
    for way in ("without", *WAYS):
        predicts = way in WAYS
        trains = way if predicts else "layer"
        model = make_model(path, LAYOUTS[RESUMED_IN], groups, trains, distributed=False, predicts=predicts)
        model.accumulate(experience(), likelihood_loss())
        found[way] = {name: one.main_grad.tolist() for name, one in model.parameters.items()}  # type: ignore[attr-defined]
    return found
