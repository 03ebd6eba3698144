"""The ranks of test_vision: tiny vision-language models in many parallel layouts, in one world of four ranks."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.data.experience import Experience
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import begin_adapters
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import add_adapters
from tests.support.trained_models import digest, gradient_differences, groups_on, in_training, of_replica
from tests.support.vision_samples import SAMPLES, experience_of, open_store, seeing_model, summed_logprobs

ALL = (0, 1, 2, 3)


class Way(NamedTuple):
    """A layout, and settings of the model."""

    grid: Grid
    settings: dict[str, Any] = {}


WAYS = {
    "one": Way(Grid((0,))),
    "tp2": Way(Grid((1, 2), tp=2)),
    "tp2_sp": Way(Grid((0, 1), tp=2), {"sequence_parallel": True}),
    "pp2": Way(Grid((2, 3), pp=2, layers_per_stage=(2, 0))),
    "pp2_even": Way(Grid((2, 3), pp=2)),
    "pp2_vpp2": Way(Grid((0, 2), pp=2, vpp=2, layers_per_stage=(2, 0, 0, 0))),
    "cp2": Way(Grid((0, 3), cp=2)),
    "cp2_by_heads": Way(Grid((1, 3), cp=2), {"cp_communication": "all_to_all"}),
    "dp2": Way(Grid((2, 3))),
    "tp2_sp_cp2": Way(Grid(ALL, tp=2, cp=2), {"sequence_parallel": True}),
    "tp2_sp_pp2": Way(Grid(ALL, tp=2, pp=2, layers_per_stage=(2, 0)), {"sequence_parallel": True}),
    "ep2": Way(Grid((0, 1), ep=2)),
    "tp2_sp_dp2": Way(Grid(ALL, tp=2), {"sequence_parallel": True}),
    "pp2_dp2": Way(Grid(ALL, pp=2, layers_per_stage=(2, 0))),
    "cp2_dp2": Way(Grid(ALL, cp=2)),
    "tp2_ep2": Way(Grid(ALL, tp=2, ep=2)),
    "pp2_ep2": Way(Grid(ALL, pp=2, ep=2, layers_per_stage=(2, 0))),
}
MAX_TOKENS = 60


class Training(NamedTuple):
    """A layout, settings of training, and whether the tower or only low-rank adapters are trained."""

    way: str
    settings: dict[str, Any] = {}
    trains_tower: bool = True
    lora: Lora | None = None


OVERLAPPED = {"overlap": True, "gradient_bucket_mb": 0.02}
ADAPTERS = Lora(rank=4, targets=("q_proj", "down_proj"))
ADAPTED_TOWER = Lora(rank=4, vision=True)
TRAININGS = {
    "whole": {
        "one": Training("one"),
        "dp2": Training("dp2"),
        "dp2 unsharded": Training("dp2", {"distributed_optimizer": False}),
        "dp2 overlapped": Training("dp2", OVERLAPPED),
        "dp2 unsharded overlapped": Training("dp2", {"distributed_optimizer": False, **OVERLAPPED}),
        "tp2_sp_dp2 overlapped": Training("tp2_sp_dp2", OVERLAPPED),
        "pp2_dp2 overlapped": Training("pp2_dp2", OVERLAPPED),
        "cp2_dp2 overlapped": Training("cp2_dp2", OVERLAPPED),
        "pp2": Training("pp2"),
    },
    "frozen": {
        "one": Training("one", trains_tower=False),
        "dp2 overlapped": Training("dp2", OVERLAPPED, trains_tower=False),
        "pp2_dp2": Training("pp2_dp2", trains_tower=False),
    },
    "adapters": {
        "one": Training("one", lora=ADAPTERS),
        "tp2_sp_dp2": Training("tp2_sp_dp2", lora=ADAPTERS),
        "pp2_dp2 overlapped": Training("pp2_dp2", OVERLAPPED, lora=ADAPTERS),
    },
    "adapters of the tower": {
        "one": Training("one", lora=ADAPTED_TOWER),
        "tp2_sp_dp2": Training("tp2_sp_dp2", lora=ADAPTED_TOWER),
        "pp2_dp2 overlapped": Training("pp2_dp2", OVERLAPPED, lora=ADAPTED_TOWER),
        "pp2_vpp2": Training("pp2_vpp2", lora=ADAPTED_TOWER),
        "cp2_dp2": Training("cp2_dp2", lora=ADAPTED_TOWER),
    },
    "experts": {"one": Training("one"), "ep2": Training("ep2"), "tp2_ep2": Training("tp2_ep2", OVERLAPPED)},
}
"""Ways to train the same weights, by what is trained. The first of each is the baseline."""
BATCHES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1, 2), (3, 4, 5)),
    ((0, 2, 3), (1, 4)),
    ((5, 0), ()),
    ((1,), (4,)),
    ((), (2, 3)),
)
"""The samples of two replicas in each step: without images on one or on both, or without samples."""


def differences(folder: str, asked: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the differences from transformers for every kind of model in the layouts `asked` for.

    A layout with " x 2" has two copies of each sample.
    """
    groups = groups_on(way.grid for way in WAYS.values())
    store = open_store(Path(folder), dist.get_rank())
    found = {}
    for kind, names in asked.items():
        for name in names:
            if dist.get_rank() in WAYS[name.partition(" x ")[0]].grid.ranks:
                way, _, copies = name.partition(" x ")
                found[f"{kind}/{name}"] = _differences(Path(folder, kind), way, groups, store, int(copies or 1))
    return found


def _differences(folder: Path, name: str, groups: ProcessGroups, store: ImageStore, copies: int = 1) -> dict[str, Any]:
    """Returns the differences from transformers. With several `copies` of each sample, they share all rows."""
    trained, samples = _trained(folder, name, groups, store, distributed_optimizer=False), _share(name)
    if copies > 1:
        trained.model.share_prefixes = True
        samples = samples.select(torch.arange(samples.num_samples).repeat_interleave(copies))
        batches = trained.model.micro_batches(samples, MAX_TOKENS)
        assert sum(batch.num_computed_tokens for batch in batches) < 0.8 * samples.num_tokens, (
            "short samples share none"
        )
    expected = load_file(folder / "expected.safetensors")["logprobs"].split(experience_of(SAMPLES).lengths.tolist())
    logprobs = trained.evaluate(samples, max_tokens=MAX_TOKENS)
    of_share = torch.cat([expected[number] for number in samples.sample_ids.tolist()])
    gradients = gradient_differences(trained, folder / "gradients", samples, summed_logprobs, copies)
    return {
        "logprobs": float((logprobs - of_share).abs().max()),
        "gradients": gradients,
        "parameters": [name for name, _ in trained.layout.on(dist.get_rank()).parameters],
    }


def _trained(folder: Path, name: str, groups: ProcessGroups, store: ImageStore, **settings: Any) -> TrainableModel:
    way = WAYS[name]
    model = seeing_model(folder, way.grid, groups, store, **way.settings)
    return in_training(model, updates=4, max_tokens=MAX_TOKENS, optimizer={"lr": 1e-2}, **settings)


def _share(name: str) -> Experience:
    return of_replica(experience_of(SAMPLES), WAYS[name].grid)


def steps(folder: str) -> dict[str, Any]:
    """Returns this rank's log-probs after the steps of BATCHES, by training."""
    groups = groups_on(way.grid for way in WAYS.values())
    store = open_store(Path(folder), dist.get_rank())
    found = {}
    for what, trainings in TRAININGS.items():
        for name, training in trainings.items():
            if dist.get_rank() in WAYS[training.way].grid.ranks:
                kind = "qwen3_vl_moe" if what == "experts" else "qwen3_vl"
                found[f"{what}/{name}"] = _steps(Path(folder, kind), training, groups, store)
    return found


def _steps(folder: Path, training: Training, groups: ProcessGroups, store: ImageStore) -> dict[str, Any]:
    grid, settings = WAYS[training.way]
    vision = schema.VisionSettings(train=training.trains_tower)
    model = seeing_model(folder, grid, groups, store, vision=vision, **settings)
    if training.lora:
        adapters = add_adapters(model, training.lora)
        begin_adapters(adapters.layout, dist.get_rank(), adapters.parameters, training.lora, seed=1)
    trained = in_training(model, updates=8, max_tokens=MAX_TOKENS, optimizer={"lr": 1e-2}, **training.settings)
    towers = [name for name in trained.published if "vision." in name]
    before = digest(trained.published[name] for name in towers)
    samples, at = experience_of(SAMPLES), grid.coordinates(dist.get_rank())
    shares = [batch if grid.dp == 2 else (batch[0] + batch[1],) for batch in BATCHES]
    mini_batches = [samples.select(torch.tensor(share[at.dp], dtype=torch.int64)) for share in shares]
    metrics = trained.train_batches(mini_batches, summed_logprobs)
    after = digest(trained.published[name] for name in towers)
    return {
        "losses": [one["loss"] for one in metrics],
        "norms": [one["grad_norm"] for one in metrics],
        "logprobs": trained.evaluate(samples, max_tokens=MAX_TOKENS).tolist(),
        "tower": {"is_here": bool(towers), "changed": before != after, "digest": after},
    }
