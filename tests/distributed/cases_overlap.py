"""The ranks of test_overlap: the same optimizer steps with and without overlap of data-parallel communication."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import DivergenceError
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.optimizer import GradientReduction
from rltrain.training.trainable import SKIPPED
from tests.distributed import cases_training
from tests.distributed.cases_accumulation import weights_of
from tests.distributed.cases_training import load_model, negative_log_likelihood, share_of, spoiled
from tests.support.trained_models import groups_on, in_training, load_experience
from tests.support.uneven_products import uneven_products

GRIDS = {
    "dp2": Grid((0, 1)),
    "dp4": Grid((0, 1, 2, 3)),
    "tp2_dp2": Grid((0, 1, 2, 3), tp=2),
    "pp2_dp2": Grid((0, 1, 2, 3), pp=2),
}
WAYS = {
    "dp2/plain": ("dp2", "qwen3", {"distributed_optimizer": False}),
    "dp2/recomputed": ("dp2", "qwen3", {"recompute": "full"}),
    "dp2/tied_bfloat16": ("dp2", "qwen2_tied", {"dtype": "bfloat16"}),
    "dp4": ("dp4", "qwen3", {}),
    "tp2_dp2/sharded": ("tp2_dp2", "qwen3", {}),
    "pp2_dp2/tied": ("pp2_dp2", "qwen2_tied", {}),
}
"""Layout, checkpoint, and settings of training."""
BUCKET_MB = 0.05
"""Gives the tiny model several buckets."""
NUM_SAMPLES, MAX_TOKENS = 6, 60
MAX_SKIPPED = 2


def all_cases(checkpoints: dict[str, str]) -> dict[str, Any]:
    """Returns by way this rank's results, with overlap and without."""
    groups, results = groups_on(GRIDS.values()), dict[str, Any]()
    with mock.patch.dict(cases_training.GRIDS, GRIDS), uneven_products():
        for name, (layout, checkpoint, settings) in WAYS.items():
            if dist.get_rank() in GRIDS[layout].ranks:
                path = Path(checkpoints[checkpoint])
                results[name] = [dict(_run(path, layout, groups, overlap, **settings)) for overlap in (True, False)]
    return results


def _run(
    path: Path,
    layout: str,
    groups: ProcessGroups,
    overlap: bool,
    *,
    distributed_optimizer: bool = True,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """Trains on mini-batches with empty shares, in a step of several parts and in a failing step. Yields the log-probs
    too."""
    trainable = in_training(
        load_model(path, layout, groups, **settings),
        updates=8,
        max_tokens=MAX_TOKENS,
        max_skipped=MAX_SKIPPED,
        optimizer={"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "clip_grad": 0},
        distributed_optimizer=distributed_optimizer,
        overlap=overlap,
        gradient_bucket_mb=BUCKET_MB,
    )
    whole = load_experience(path).select(torch.arange(NUM_SAMPLES))
    share, none = share_of(whole, layout), whole.select(torch.arange(0))
    replica = GRIDS[layout].coordinates(dist.get_rank()).dp
    begun = []
    begin_rest = GradientReduction.begin_rest

    def count(reduction: GradientReduction) -> None:
        begun.append((reduction._begun, len(reduction._groups)))
        begin_rest(reduction)

    def samples(number: int, of: int) -> Experience:
        return whole.select(torch.arange(5)) if replica == number else (share if of else none)

    with mock.patch.object(GradientReduction, "begin_rest", count):
        batches = [share, samples(0, 0), samples(1, 0), share]
        steps = trainable.train_batches(batches, negative_log_likelihood)
        for part in (share, samples(1, 0)):
            trainable.accumulate(part, negative_log_likelihood)
        steps.append(trainable.step())
        yield "skipped", _skips(trainable, share, spoiled=replica == 0)
        try:
            trainable.train_batches([share] * 4, spoiled)
        except DivergenceError as error:
            yield "diverged", str(error)
        yield "values", trainable.evaluate(samples(0, 1), max_tokens=MAX_TOKENS).sum().item()
        steps.append(trainable.train_batch(share, negative_log_likelihood))
    yield "steps", steps
    yield "begun", begun
    yield "weights", weights_of(trainable)


def _skips(trainable: TrainableModel, share: Experience, *, spoiled: bool) -> dict[str, Any]:
    """Trains steps spoiled by one replica's share. The second has a usual part around it."""
    advantages = torch.ones(share.num_tokens)
    if spoiled:
        advantages[int(torch.nonzero(share.response_mask)[0])] = math.inf
    infinite = share.with_fields(advantages=advantages)
    usual = infinite.with_fields(advantages=torch.ones(share.num_tokens))
    loss = policy_loss(schema.Loss(old_logprobs="rollout"), max_response_tokens=8)

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in trainable.save_state().tensors.items()}

    before = state()
    first = trainable.train_batch(infinite, loss)
    after = state()
    same = [before.keys() == after.keys(), *(torch.equal(before[name], after[name]) for name in before)]
    rest = trainable.train_batches([usual, infinite, usual], loss)
    return {
        "same": all(same),
        "loss": first["loss"],
        "skipped": [step[SKIPPED] for step in (first, *rest)],
        "finite": [math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in rest],
        "weights": weights_of(trainable),
    }
