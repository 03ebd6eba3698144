"""The ranks of test_prefixes: every objective with and without shared prefixes, on the same ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.runtime.grid import Grid
from rltrain.training.trainable import TrainedModel
from tests.distributed.cases_context_parallel import (
    BALANCED,
    BY_HEADS,
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
from tests.support.trained_models import groups_on, in_training, megatron_model, summed_gradients

GRIDS = {
    **CUT_GRIDS,
    "tp2": Grid((0, 1), tp=2),
    "pp2": Grid((2, 3), pp=2),
    "ep2": Grid((0, 1), ep=2),
    "tp2_pp2": Grid((0, 1, 2, 3), tp=2, pp=2),
}
MAX_TOKENS = 150
FEW: Layouts = {
    "grpo": {"tp1": {}, "tp2_cp2": {}},
    "dpo": {"pp2": {}},
    "experts_gspo": {"ep2": {}},
}
OTHERS: Layouts = {
    "grpo": {
        "tp2": {**SEQUENCE_PARALLEL, "recompute": "full"},
        "pp2_cp2": {"recompute": "selective"},
        "tp2_pp2": {"logits_chunk_tokens": 37},
    },
    "gspo": {"cp4": BY_HEADS},
    "distillation": {"tp2_cp2": SEQUENCE_PARALLEL},
    "critic": {"tp2_cp2": {**SEQUENCE_PARALLEL, **BY_HEADS}},
    "reward_model": {"cp2": {}},
    "latent": {"tp1": {}, "tp2_cp2": BY_HEADS},
    "experts_gspo": {"cp2_dp2_ep4": {}},
    "experts_critic": {"pp2_cp2": {}, "tp2_cp2": SEQUENCE_PARALLEL},
    "rotated": {"cp2": {}},
}


def all_cases(folder: str, objectives: Layouts) -> dict[str, Any]:
    """Returns this rank's results by "objective/layout"."""
    groups, results = groups_on(GRIDS.values()), {}
    for number, (name, layouts) in enumerate(objectives.items()):
        architecture = OBJECTIVES[name][0]
        path = Path(folder, f"{name}{dist.get_rank()}")
        write_weights(architecture, path)
        for layout, settings in layouts.items():
            grid = GRIDS[f"rank{number % 4}" if layout == "tp1" else layout]
            if dist.get_rank() in grid.ranks:
                moe = BALANCED.model_copy(update={"bias_update_rate": 0.0})
                model = megatron_model(path, grid, groups, architecture=architecture, moe=moe, **settings)
                # Without the distributed optimizer, every rank has the whole gradients.
                trained = in_training(
                    model, updates=1, max_tokens=MAX_TOKENS, optimizer={"lr": 1e-30}, distributed_optimizer=False
                )
                results[f"{name}/{layout}"] = differences(trained, name)
    return results


def differences(trained: TrainedModel, name: str) -> dict[str, Any]:
    """Returns the differences of a model's results with shared prefixes from those without them, by name."""
    unshared, shared = (results_of(trained, name, share_prefixes=share) for share in (False, True))
    assert unshared.keys() == shared.keys()
    return {
        "rows": [sum(map(int, rows)) for rows in (unshared.pop("rows"), shared.pop("rows"))],
        **{
            key: float((shared[key] - value).abs().max() / value.abs().max().clamp(min=1))
            for key, value in unshared.items()
        },
    }


def results_of(trained: TrainedModel, name: str, *, share_prefixes: bool) -> dict[str, Tensor]:
    """Returns the rows of the micro-batches, log-probs or scores, gradients and metrics, by name."""
    model, loss = trained.model, OBJECTIVES[name][1]
    model.share_prefixes = share_prefixes
    samples = of_replica(experience(name), model.grid)
    batches = model.micro_batches(samples, MAX_TOKENS)
    found = {"rows": torch.tensor([batch.num_rows * model.share.size for batch in batches])}
    found["told"] = trained.evaluate(samples, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
    if model.architecture.head == "vocabulary":
        told = trained.distributions(samples, count=2, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
        found |= {f"distribution {number}": values.float() for number, values in enumerate(told)}
    found |= {f"gradient of {key}": value.clone() for key, value in summed_gradients(trained, samples, loss).items()}
    metrics = trained.step()
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
