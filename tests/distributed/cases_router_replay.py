"""The ranks of test_router_replay: given choices of experts, cut along tokens and layers, and choices of an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import read_architecture
from rltrain.models.routing_shape import RoutingShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import SampleGroup, pack_groups
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from tests.distributed.cases_experts import ALL, MAX_TOKENS, Layout, differences_from, make_trained, share_of
from tests.support.rollout_models import load_engine, ragged_requests
from tests.support.trained_models import groups_on, megatron_model

SELECTIVE = {"granularity": "selective", "modules": ["moe"]}
LAYOUTS = {
    "one_rank": Layout(Grid((0,)), distributed=False),
    "tp2_ep2": Layout(Grid(ALL, tp=2, ep=2)),
    "pp2_ep2_recomputed": Layout(Grid(ALL, pp=2, ep=2), recompute="full"),
    "pp4_moe_recomputed": Layout(Grid(ALL, pp=4), recompute=SELECTIVE),  # type: ignore[arg-type]
    "tp2_cp2_ep2": Layout(Grid(ALL, tp=2, cp=2, ep=2)),
    "pp2_vpp2_cp2": Layout(Grid(ALL, pp=2, vpp=2, cp=2, layers_per_stage=(1, 1, 1, 1)), recompute="full"),
    "interleaved": Layout(Grid(ALL, pp=4, vpp=2, layers_per_stage=(1, 0, 1, 0, 1, 0, 1, 0))),
}


def all_cases(folder: str, layouts: list[str], close: dict[str, str]) -> dict[str, Any]:
    groups = groups_on(LAYOUTS[layout].grid for layout in layouts)
    results: dict[str, Any] = {
        layout: _replayed(Path(folder), LAYOUTS[layout], groups)
        for layout in layouts
        if dist.get_rank() in LAYOUTS[layout].grid.ranks
    }
    if dist.get_rank() == 0:
        results["engine"] = {dtype: _beside_engine(Path(path), dtype, groups) for dtype, path in close.items()}
    return results


def given_experts(shape: RoutingShape, experience: Experience, num_experts: int) -> Tensor:
    """Returns random choices of experts, shape [tokens, layers, top_k]. They ignore the routers.

    Every fifth token has none. A sample always gets the same choices.
    """
    given = []
    for sample, length in zip(experience.sample_ids.tolist(), experience.lengths.tolist(), strict=True):
        generator = torch.Generator().manual_seed(sample)
        order = torch.rand(length, shape.num_layers, num_experts, generator=generator).argsort(-1)
        experts = order[..., : shape.top_k].to(shape.experts)
        experts[::5] = shape.unknown(length)[::5]
        given.append(experts)
    return torch.cat([shape.unknown(0), *given])


def _replayed(path: Path, layout: Layout, groups: ProcessGroups) -> dict[str, Any]:
    """Trains with given choices.

    Returns an optimizer step with the log-probs before it, the routers' own choices, and gradient differences on one
    rank.
    """
    architecture = read_architecture(path)
    shape, experience = RoutingShape.of(architecture), share_of(path, layout.grid)
    packed = shape.packed(given_experts(shape, experience, architecture.num_experts))
    differences = {}
    if not layout.distributed:
        model = make_trained(path, layout, groups, {})
        differences = differences_from(path / "replayed", model, experience.with_fields(routed_experts=packed))
    model = make_trained(path, layout, groups, {})
    own, found = model.evaluate_routing(experience, max_tokens=MAX_TOKENS)
    again = model.evaluate(experience.with_fields(routed_experts=found), max_tokens=MAX_TOKENS)
    replayed = experience.with_fields(routed_experts=packed)
    logprobs = model.evaluate(replayed, max_tokens=MAX_TOKENS)
    told = {"sample_ids": experience.sample_ids, "found": shape.unpacked(found), "own": own, "again": again}
    told["logprobs"] = logprobs
    step = model.train_batch(replayed, likelihood_loss())
    return {"differences": differences, "step": step, **{name: values.tolist() for name, values in told.items()}}


def _beside_engine(path: Path, dtype: str, groups: ProcessGroups) -> dict[str, Any]:
    """Returns the differences between log-probs of the trainer and of an engine, with and without the engine's
    choices."""
    engine, _ = load_engine(path, dtype=getattr(torch, dtype), record_routing=True)
    requests = [replace(sample, id=number) for number, sample in enumerate(ragged_requests(8))]
    drawn = engine.generate(requests, SamplingParams(1.0, 1.0, 0, 16, ()))
    groups_of_samples = [SampleGroup(sample.id, 0, (sample,)) for sample in drawn]
    experience = pack_groups(groups_of_samples, range(len(drawn)), RoutingShape.of(read_architecture(path)))
    own_model = megatron_model(path, Grid((0,)), groups, dtype=dtype)
    model = TrainableModel(own_model, schema.Actor(distributed_optimizer=False), total_updates=1)
    columns = experience.columns()
    del columns["routed_experts"]
    response = experience.response_mask

    def difference(of: Experience) -> tuple[float, float]:
        apart = (model.evaluate(of, max_tokens=500) - of.rollout_logprobs)[response].abs()
        return float(apart.mean()), float(apart.max())

    without, replayed = difference(Experience(**columns)), difference(experience)
    step = model.train_batch(experience, likelihood_loss())
    return {"without": without, "replayed": replayed, "step": step}
