"""The ranks of test_prefixes: every objective with and without shared prefixes, on the same ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, likelihood_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.fsdp_backend import ShardedTrainableModel
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.trainable import TrainedModel
from tests.distributed.cases_context_parallel import (
    BALANCED,
    BY_HEADS,
    LATENT_EXPERTS,
    OBJECTIVES,
    SEQUENCE_PARALLEL,
    TEMPERATURE,
    Layouts,
    write_weights,
)
from tests.distributed.cases_context_parallel import (
    GRIDS as CUT_GRIDS,
)
from tests.distributed.cases_context_parallel import (
    experience as fields_of,
)
from tests.distributed.cases_fsdp import Way, build
from tests.distributed.cases_training import negative_log_likelihood
from tests.support.model_shards import tiny_architecture
from tests.support.trained_models import groups_on, in_training, load_experience, megatron_model, summed_gradients

GRIDS = {
    **CUT_GRIDS,
    "tp2": Grid((0, 1), tp=2),
    "pp2": Grid((2, 3), pp=2),
    "ep2": Grid((0, 1), ep=2),
    "tp2_pp2": Grid((0, 1, 2, 3), tp=2, pp=2),
}
WAYS = {
    "megatron": Way("megatron", ranks=2, tp=2, max_tokens=150),
    "fsdp": Way(ranks=3, max_tokens=150),
    "fsdp_cp2": Way(ranks=4, cp=2, max_tokens=150),
}
MAX_TOKENS = 150
PREDICTING = tiny_architecture("mimo", hidden_size=32, head_dim=8, num_heads=8, vocab_size=61).predicting()
MODELS = {
    **OBJECTIVES,
    "further": (PREDICTING, likelihood_loss()),
    "experts_further": (LATENT_EXPERTS.predicting(), likelihood_loss()),
}
"""Models and losses. Some models have a layer that predicts a further token."""
FEW: Layouts = {
    "grpo": {"tp1": {}, "tp2_cp2": {}},
    "dpo": {"pp2": {}},
    "experts_gspo": {"ep2": {}},
    "further": {"tp1": {}},
}
OTHERS: Layouts = {
    "grpo": {
        "tp2": {**SEQUENCE_PARALLEL, "recompute": "full"},
        "pp2_cp2": {"recompute": "selective"},
        "tp2_pp2": {},
    },
    "gspo": {"cp4": BY_HEADS},
    "distillation": {"tp2_cp2": SEQUENCE_PARALLEL},
    "critic": {"tp2_cp2": {**SEQUENCE_PARALLEL, **BY_HEADS}},
    "reward_model": {"cp2": {}},
    "latent": {"tp1": {}, "tp2_cp2": BY_HEADS},
    "experts_gspo": {"cp2_dp2_ep4": {}},
    "experts_critic": {"pp2_cp2": {}, "tp2_cp2": SEQUENCE_PARALLEL},
    "rotated": {"cp2": {}},
    "further": {"tp2": SEQUENCE_PARALLEL, "pp2": {}, "cp2": {}, "tp2_cp2": {**SEQUENCE_PARALLEL, **BY_HEADS}},
    "experts_further": {"ep2": {}, "tp2_pp2": {}, "cp2": {}},
}


def all_cases(folder: str, objectives: Layouts) -> dict[str, Any]:
    """Returns this rank's results by "objective/layout"."""
    groups, results = groups_on(GRIDS.values()), {}
    for number, (name, layouts) in enumerate(objectives.items()):
        architecture, loss = MODELS[name]
        path = Path(folder, f"{name}{dist.get_rank()}")
        write_weights(architecture, path)
        for layout, settings in layouts.items():
            grid = GRIDS[f"rank{number % 4}" if layout == "tp1" else layout]
            if dist.get_rank() in grid.ranks:
                make = partial(_trained, architecture, path, grid, groups, **settings)
                results[f"{name}/{layout}"] = differences(make, experience(name), loss)
    return results


def _trained(
    architecture: Architecture, path: Path, grid: Grid, groups: ProcessGroups, **settings: Any
) -> TrainableModel:
    mtp = schema.Mtp(coef=0.3, trains="model") if architecture.predicts else None
    model = megatron_model(path, grid, groups, architecture=architecture, moe=BALANCED, mtp=mtp, **settings)
    # Without the distributed optimizer, every rank has the whole gradients.
    return in_training(model, updates=1, max_tokens=MAX_TOKENS, optimizer={}, distributed_optimizer=False)


FAMILIES = [
    *((family, backend) for family in ("gemma2", "gpt_oss", "qwen3_window") for backend in WAYS),
    *(("qwen3_next", backend) for backend in ("megatron", "fsdp")),
]
"""Models with windows, softcaps, sinks or states, and their backends."""


def of_families(checkpoints: dict[str, str]) -> dict[str, Any]:
    """Returns this rank's results of FAMILIES, by "family/backend"."""
    groups, results = groups_on(way.grid for way in WAYS.values()), {}
    for name, path in checkpoints.items():
        samples = beginning_alike(load_experience(Path(path)))
        for backend, way in WAYS.items():
            if (name, backend) in FAMILIES and dist.get_rank() in way.grid.ranks:
                make = partial(build, way, Path(path), groups)
                results[f"{name}/{backend}"] = differences(make, samples, negative_log_likelihood)
    return results


def beginning_alike(samples: Experience) -> Experience:
    """Returns the samples with the first tokens of the longest, in three groups."""
    texts = [*samples.tokens.split(samples.lengths.tolist())]
    longest = max(texts, key=len)
    for number, text in enumerate(texts):
        cut = (40, 30, 20)[number % 3]
        texts[number] = torch.cat([longest[:cut][: len(text)], text[cut:]])
    return samples.with_fields(tokens=torch.cat(texts))


def differences(make: Callable[[], TrainedModel], samples: Experience, loss: LossFunction) -> dict[str, Any]:
    """Returns the differences of a model's results with shared prefixes from those without them, by name."""
    unshared, shared = (results_of(make(), samples, loss, share_prefixes=share) for share in (False, True))
    assert unshared.keys() == shared.keys()
    rows = [int(of_batches.sum()) for of_batches in (unshared.pop("rows"), shared.pop("rows"))]
    differences = {key: float((shared[key] - value).abs().max()) for key, value in unshared.items() if value.numel()}
    largest = {key: max(1.0, float(unshared[key].abs().max())) for key in differences}
    return {"rows": rows, **{key: differences[key] / largest[key] for key in differences}}


def results_of(
    trained: TrainedModel, samples: Experience, loss: LossFunction, *, share_prefixes: bool
) -> dict[str, Tensor]:
    """Returns the rows of the micro-batches, log-probs or scores, gradients and metrics, by name."""
    model = trained.model
    model.share_prefixes = share_prefixes
    samples = of_replica(samples, model.grid)
    batches = model.micro_batches(samples, MAX_TOKENS)
    found = {"rows": torch.tensor([batch.num_computed_tokens for batch in batches])}
    found["told"] = trained.evaluate(samples, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
    if model.architecture.head == "vocabulary":
        told = trained.distributions(samples, count=2, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
        found |= {f"distribution {number}": values.float() for number, values in enumerate(told)}
    if isinstance(trained, ShardedTrainableModel):
        trained.accumulate(samples, loss)
        gradients = trained.optimizer.gradients()
    else:
        assert isinstance(trained, TrainableModel)
        gradients = summed_gradients(trained, samples, loss)
    found |= {f"gradient of {key}": value.clone() for key, value in gradients.items()}
    metrics = trained.step()
    del metrics["shared_tokens_ratio"]
    return found | {f"metric {key}": torch.tensor(value) for key, value in metrics.items()}


def of_replica(samples: Experience, grid: Grid) -> Experience:
    """Returns the samples of this rank's replica: whole groups."""
    at = grid.coordinates(dist.get_rank())
    return samples.select(torch.nonzero(samples.group_ids % grid.dp == at.dp).flatten())


SHAPE = [(30, 20), (30, 9), (30, 31), (30, 31), (25, 17), (25, 24), (3, 8), (4, 11), (30, 7), (30, 20)]
"""Prompt and response tokens of the samples."""


def experience(name: str) -> Experience:
    """Returns samples that begin alike: a system prompt, prompts of groups, a response that goes on, two equal ones."""
    samples = fields_of(name, SHAPE)
    texts = [*samples.tokens.split(samples.lengths.tolist())]
    for number in (1, 2, 3, 8, 9):
        texts[number] = torch.cat([texts[0][:30], texts[number][30:]])
    texts[5] = torch.cat([texts[0][:18], texts[5][18:]])
    texts[4] = torch.cat([texts[5][:25], texts[4][25:]])
    texts[3] = torch.cat([texts[2][:48], texts[3][48:]])
    texts[9] = texts[0].clone()
    texts[8] = texts[0][:37].clone()
    return samples.with_fields(tokens=torch.cat(texts))
