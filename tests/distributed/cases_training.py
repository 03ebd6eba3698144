"""The ranks of test_training: one tiny model in many parallel layouts, in one world of four ranks."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from rltrain.algorithms.losses import LossOutput, masked_max, masked_sum, token_weights
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, DivergenceError
from rltrain.models import attention as model_attention
from rltrain.models import fused
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training import vocabulary
from rltrain.training.megatron import attention, norms, platform
from rltrain.training.megatron.backend import EvaluableModel, TrainableModel, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.packing import MicroBatch
from tests.support import triton_interpreter
from tests.support.tiny_checkpoints import ENTROPY_COEF, TEMPERATURE
from tests.support.trained_models import (
    groups_on,
    in_training,
    load_experience,
    megatron_model,
    of_replica,
    summed_gradients,
)

GRIDS = {
    "tp1": Grid((0,)),
    "tp2": Grid((1, 3), tp=2),
    "tp2_sp": Grid((0, 2), tp=2),
    "pp2": Grid((1, 2), pp=2),
    "dp2": Grid((2, 3)),
    "tp2_dp2": Grid((0, 1, 2, 3), tp=2),
    "tp2_dp2_sp": Grid((0, 1, 2, 3), tp=2),
    "tp4": Grid((0, 1, 2, 3), tp=4),
    "tp4_sp": Grid((0, 1, 2, 3), tp=4),
    "tp2_pp2": Grid((0, 1, 2, 3), tp=2, pp=2),
    "pp2_dp2": Grid((0, 1, 2, 3), pp=2),
    "pp3_vpp2": Grid((0, 1, 3), pp=3, vpp=2, layers_per_stage=(1, 0, 1, 1, 1, 0)),
    **{f"rank{rank}": Grid((rank,)) for rank in range(4)},
}
QUICK_LAYOUTS = {"qwen3": ("tp1", "tp2_dp2_sp", "tp4", "tp2_pp2"), "qwen2_tied": ("tp1", "pp3_vpp2")}
SLOW_LAYOUTS = {"qwen3": ("tp1", "tp2", "tp2_sp", "dp2", "tp4_sp", "pp2_dp2"), "qwen2_tied": ("tp1", "tp2_pp2")}
"""Layouts by checkpoint. The tied one has four layers, the other two. The first layout of each is the baseline."""
MADE_AGAIN = ("tp2_sp", "tp2_pp2")
SMALL_TILES = (("qwen3", "tp2_sp"), ("qwen2_tied", "tp2_pp2"))
WIDE = {"dtype": "bfloat16", "residual_dtype": "float32", "head_dtype": "float32"}
RECOMPUTED: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "one_layer": {"granularity": "full", "layers": 1},
    "modules": {"granularity": "selective", "modules": ["core_attn", "mlp"]},
}
MAX_RATIO, FIRST_RATIO = 3.0, 40.0
"""The limit of the mean ratio, and the ratio of the first replica's tokens."""
TOO_LARGE = schema.LossScale(initial=2.0**16, window=2, hysteresis=2)
TOO_SMALL = schema.LossScale(initial=1.0, minimum=1.0)
NUM_STEPS = 3
ONE_MICRO_BATCH, SEVERAL_MICRO_BATCHES = 10_000, 130
"""Tokens per micro-batch: all samples of a replica together, or up to three parts of them."""


def all_cases(checkpoints: dict[str, str], slow: bool) -> dict[str, Any]:
    """Returns this rank's quick or slow checks, by name."""
    groups = groups_on(GRIDS.values())
    paths = {name: Path(path) for name, path in checkpoints.items()}
    results: dict[str, Any] = {}
    quick = (_layouts, _failures, _far_updates, _loss_scales, _made_again)
    chosen = (_layouts, _variants, _families) if slow else quick
    for case in chosen:
        results |= dict(case(paths, groups, SLOW_LAYOUTS if slow else QUICK_LAYOUTS))
    results["parallel_state_initialized"] = parallel_state.model_parallel_is_initialized()
    results["instructions"] = torch.backends.cpu.get_cpu_capability()
    return results


Results = Iterator[tuple[str, Any]]


def _layouts(paths: dict[str, Path], groups: ProcessGroups, layouts: Mapping[str, Sequence[str]]) -> Results:
    """Yields loss, gradient norm and log-probs of three updates in every layout, with one or several micro-batches."""
    for checkpoint, of_checkpoint in layouts.items():
        for layout in of_checkpoint:
            is_untied = checkpoint == "qwen3"
            both = layout in ("tp1", "tp2")
            for max_tokens in (ONE_MICRO_BATCH, SEVERAL_MICRO_BATCHES) if both else (SEVERAL_MICRO_BATCHES,):
                if dist.get_rank() in GRIDS[layout].ranks:
                    report = _train(paths[checkpoint], layout, groups, max_tokens, evaluates=is_untied)
                    yield f"{checkpoint}/{layout}/{max_tokens}", report


def _variants(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields results of settings that change the way of computing, but not the result."""
    rank = dist.get_rank()
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "plain_optimizer": ("dp2", {"distributed_optimizer": False}),
        **{f"recompute_{name}": ("tp2_sp", {"recompute": recompute}) for name, recompute in RECOMPUTED.items()},
        "bfloat16/tp2_dp2": ("tp2_dp2", {"dtype": "bfloat16"}),
        "bfloat16/plain_optimizer": ("tp2_dp2", {"dtype": "bfloat16", "distributed_optimizer": False}),
        "bfloat16/wide_tp2_dp2_sp": ("tp2_dp2_sp", WIDE),
        "bfloat16/wide_tp2_pp2": ("tp2_pp2", WIDE),
    }
    for name, (layout, settings) in ways.items():
        if rank in GRIDS[layout].ranks:
            yield name, _train(paths["qwen3"], layout, groups, SEVERAL_MICRO_BATCHES, **settings)
    for layout in ("tp1", "pp3_vpp2"):
        if rank in GRIDS[layout].ranks:
            model = load_model(paths["qwen2_tied"], layout, groups)
            few = load_experience(paths["qwen2_tied"]).select(torch.arange(2))
            yield f"two_samples/{layout}", make_trainable(model).train_batch(few, negative_log_likelihood)
    for checkpoint, layout in SMALL_TILES:
        if rank in GRIDS[layout].ranks:
            with _small_tiles():
                found = _train(paths[checkpoint], layout, groups, SEVERAL_MICRO_BATCHES)
            yield f"small_tiles/{checkpoint}/{layout}", found
    yield "float16/tp2_pp2", _train(paths["qwen3"], "tp2_pp2", groups, ONE_MICRO_BATCH, dtype="float16")


def _made_again(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields the largest differences of gradients if backward makes cheap outputs again, relative to the largest
    element, with kernels in Triton's interpreter and without."""
    for kernels, layout in product((None, fused), MADE_AGAIN):
        if dist.get_rank() not in GRIDS[layout].ranks:
            continue
        triton_interpreter.mend()
        with patch.object(model_attention, "fused_kernels", lambda device, kernels=kernels: kernels):
            kept, again = (_gradients(paths["qwen3"], layout, groups, recompute) for recompute in ("none", "selective"))
        assert kept.keys() == again.keys() and kept
        name = f"made_again/{layout}/{'kernels' if kernels else 'torch'}"
        yield name, [_difference(again[key], of) / float(of.abs().max().clamp(min=1e-3)) for key, of in kept.items()]


def _gradients(path: Path, layout: str, groups: ProcessGroups, recompute: str) -> dict[str, Tensor]:
    trained = make_trainable(load_model(path, layout, groups, recompute=recompute))
    few = share_of(load_experience(path).select(torch.arange(2)), layout)
    return {name: one.clone() for name, one in summed_gradients(trained, few, negative_log_likelihood).items()}


@contextmanager
def _small_tiles() -> Iterator[None]:
    """Limits tiles of logits to 37 rows and 8 columns, and keeps none for backward."""
    with (
        patch.dict(vocabulary.TILE_ELEMENTS, cpu=37 * 8),
        patch.dict(vocabulary.TILE_ROWS, cpu=37),
        patch.dict(vocabulary.KEPT_ELEMENTS, cpu=0),
    ):
        yield


def _families(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields the largest difference from transformers' logits, packed and one sample at a time. Each rank takes some
    families."""
    for index, (name, path) in enumerate(sorted(paths.items())):
        layout = f"rank{index % 4}"
        if dist.get_rank() not in GRIDS[layout].ranks:
            continue
        model = load_model(path, layout, groups)
        expected = load_file(path / "expected.safetensors")["logits"]
        limits = (10_000, 60, 1)
        yield f"family/{name}", [_difference(_logits(model, path, limit), expected) for limit in limits]
        yield f"fused/{name}/float32", _differences_from_plain_layers(model, path)
        yield f"fused/{name}/float64", _differences_from_plain_layers(model.double(), path)


def _differences_from_plain_layers(model: LanguageModel, path: Path) -> dict[str, float]:
    """Returns the relative differences of logits and of every parameter's gradients, by name."""
    actual = logits_and_gradients(model, path)
    with plain_layers():
        expected = logits_and_gradients(model, path)
    return {
        name: _difference(actual[name], value) / (float(value.abs().max()) or 1.0) for name, value in expected.items()
    }


@contextmanager
def plain_layers() -> Iterator[None]:
    """Uses the layers of torch and Megatron instead of the fused ones."""
    with ExitStack() as stack:
        for module in (platform, attention, norms):
            stack.enter_context(patch.object(module, "takes_fused", lambda x: False))
        stack.enter_context(patch.object(platform, "HAS_ONEDNN", False))
        yield


def logits_and_gradients(model: LanguageModel, path: Path) -> dict[str, Tensor]:
    """Returns "logits" of all samples in one micro-batch, and the parameters' gradients by name."""
    batches = model.micro_batches(load_experience(path), 10_000)
    model.zero_grad()

    def outputs(_: MicroBatch, states: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits_of(states)[:, :]
        return logits.cos().sum(), logits.detach()

    (logits,) = run_schedule(model, batches, outputs, backward=True)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits": logits, **gradients}


def _failures(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields two failures: a loss that is not finite on one rank ends the update on all, and settings without
    Transformer Engine are refused."""
    latents = {"granularity": "selective", "modules": ["mla_up_proj", "mlp"]}
    yield "latents", error_of_loading(paths["qwen3"], groups, latents)
    for layout in ("tp2_dp2", "pp2_dp2"):
        trainable = make_trainable(load_model(paths["qwen3"], layout, groups))
        before = [parameter.detach().clone() for parameter in trainable.model.parameters()]
        experience = share_of(load_experience(paths["qwen3"]), layout)
        first = GRIDS[layout].coordinates(dist.get_rank()).dp == 0
        yield f"nan/{layout}", error_of(trainable, experience, spoiled if first else negative_log_likelihood)
        yield f"nan_gradient/{layout}", error_of(trainable, experience, _steep if first else negative_log_likelihood)
        yield f"weights_kept/{layout}", all(map(torch.equal, before, trainable.model.parameters()))


def _far_updates(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields steps with a limit of the mean ratio, which only the samples of the first replica exceed."""
    loss = policy_loss(schema.Loss(old_logprobs="rollout"), max_response_tokens=8)
    for layout in ("tp2_dp2", "pp2_dp2"):
        trainable = make_trainable(load_model(paths["qwen3"], layout, groups), max_ratio=MAX_RATIO)
        experience = share_of(load_experience(paths["qwen3"]), layout)
        logprobs = trainable.evaluate(experience, max_tokens=ONE_MICRO_BATCH)
        usual = experience.with_fields(rollout_logprobs=logprobs, advantages=torch.ones(experience.num_tokens))
        above = math.log(FIRST_RATIO) if GRIDS[layout].coordinates(dist.get_rank()).dp == 0 else 0.0
        before = [parameter.detach().clone() for parameter in trainable.model.parameters()]
        steps = [trainable.train_batch(usual.with_fields(rollout_logprobs=logprobs - above), loss) for _ in range(2)]
        kept = all(map(torch.equal, before, trainable.model.parameters()))
        steps.append(trainable.train_batch(usual, loss))
        moved = not all(map(torch.equal, before, trainable.model.parameters()))
        tokens = int(experience.response_mask.sum())
        yield f"far/{layout}", {"steps": steps, "kept": kept, "moved": moved, "tokens": tokens, "above": above}


def _loss_scales(paths: dict[str, Path], groups: ProcessGroups, *_: Any) -> Results:
    """Yields steps from a loss scale far too large, in a run that is resumed from its state in the middle."""
    layout, path = "tp2_dp2", paths["qwen3"]
    experience = share_of(load_experience(path).select(torch.arange(4)), layout)
    first = make_trainable(load_model(path, layout, groups, dtype="float16"), loss_scale=TOO_LARGE)
    before = [parameter.detach().clone() for parameter in first.model.parameters()]
    steps = [first.train_batch(experience, negative_log_likelihood) for _ in range(3)]
    kept = all(map(torch.equal, before, first.model.parameters()))
    second = make_trainable(load_model(path, layout, groups, dtype="float16"), loss_scale=TOO_LARGE)
    second.loss_scale.load(first.loss_scale.state())
    steps += [second.train_batch(experience, negative_log_likelihood) for _ in range(7)]
    yield "loss_scale", {"steps": steps, "kept": kept}
    smallest = make_trainable(load_model(path, layout, groups, dtype="float16"), loss_scale=TOO_SMALL)
    yield "loss_scale_at_its_minimum", error_of(smallest, experience, _steep)


def error_of_loading(path: Path, groups: ProcessGroups, recompute: dict[str, Any]) -> str:
    try:
        load_model(path, f"rank{dist.get_rank()}", groups, recompute=recompute)
    except ConfigError as error:
        return str(error)
    return "no error"


def error_of(trainable: TrainableModel, experience: Experience, loss: Callable[..., LossOutput]) -> str:
    try:
        trainable.train_batch(experience, loss)
    except (DivergenceError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _train(
    path: Path,
    layout: str,
    groups: ProcessGroups,
    max_tokens: int,
    *,
    distributed_optimizer: bool = True,
    evaluates: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Returns three updates, and with `evaluates` the log-probs before and after them."""
    model, whole = load_model(path, layout, groups, **settings), load_experience(path)
    expected = load_file(path / "expected.safetensors")
    experience = share_of(whole.with_fields(rollout_logprobs=expected["logprobs"]), layout)
    report: dict[str, Any] = {}
    if evaluates:
        start = EvaluableModel(model).evaluate(experience, temperature=TEMPERATURE, max_tokens=max_tokens)
        report["start_difference"] = _difference(start, experience.rollout_logprobs)
    trainable = make_trainable(model, max_tokens=max_tokens, distributed_optimizer=distributed_optimizer)
    steps = [
        trainable.train_batch(experience, negative_log_likelihood, temperature=TEMPERATURE) for _ in range(NUM_STEPS)
    ]
    if evaluates:
        end = trainable.evaluate(experience, temperature=TEMPERATURE, max_tokens=max_tokens)
        report["end_logprobs"] = end.tolist()
    return report | {
        "steps": steps,
        "expected_loss": float(expected["loss"]),
        "expected_grad_norm": float(expected["grad_norm"]),
        "response_tokens": int(whole.response_mask.sum()),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "of_the_layout": {name: tuple(one.shape) for name, one in local_parameters(model).items()}
        == dict(model.layout.on(dist.get_rank()).parameters),
    }


def negative_log_likelihood(experience: Experience, logprobs: Tensor, entropy: Tensor) -> LossOutput:
    weights = token_weights(experience, "token_mean")
    return LossOutput(
        loss=-masked_sum(logprobs, weights.factor) - ENTROPY_COEF * masked_sum(entropy, weights.factor),
        divisor=weights.divisor,
        sums={"samples_per_response_token": weights.divisor.new_tensor(experience.num_samples)},
        token_sums={"entropy": masked_sum(entropy.detach(), weights.factor)},
        maxima={"worst": masked_max(-logprobs, experience.response_mask)},
    )


def spoiled(*arguments: Any) -> LossOutput:
    output = negative_log_likelihood(*arguments)
    return replace(output, loss=output.loss * float("nan"))


def _steep(*arguments: Any) -> LossOutput:
    """Returns a finite loss with an infinite gradient: the square root at 0."""
    output = negative_log_likelihood(*arguments)
    return replace(output, loss=output.loss + (output.loss - output.loss.detach()).sqrt())


def load_model(path: Path, layout: str, groups: ProcessGroups, **settings: Any) -> LanguageModel:
    return megatron_model(path, GRIDS[layout], groups, sequence_parallel=layout.endswith("_sp"), **settings)


def make_trainable(
    model: LanguageModel,
    max_tokens: int = 10_000,
    distributed_optimizer: bool = True,
    loss_scale: schema.LossScale | None = None,
    max_ratio: float | None = None,
) -> TrainableModel:
    optimizer = {"lr": 1e-2, "warmup_steps": 2, "decay": "linear", "weight_decay": 0.1, "loss_scale": loss_scale}
    return in_training(
        model,
        updates=NUM_STEPS,
        max_tokens=max_tokens,
        optimizer={name: value for name, value in optimizer.items() if value},
        distributed_optimizer=distributed_optimizer,
        max_ratio=max_ratio,
    )


def share_of(experience: Experience, layout: str) -> Experience:
    return of_replica(experience, GRIDS[layout])


@torch.no_grad()
def _logits(model: LanguageModel, path: Path, max_tokens: int) -> Tensor:
    """Returns the logits in the experience's token order, shape [tokens, vocabulary]."""
    experience = load_experience(path)
    batches = model.micro_batches(experience, max_tokens)
    kept = run_schedule(model, batches, lambda _, states: (states.sum(), model.logits_of(states)[:, :]), backward=False)
    whole = torch.empty(experience.num_tokens, kept[0].size(1))
    for batch, logits in zip(batches, kept, strict=True):
        whole[batch.token_index] = logits
    return whole[:, : model.architecture.vocab_size]


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())
