"""The ranks of test_fsdp: one model trained by both backends, in one world of four ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rltrain.algorithms.losses import of_states, value_loss
from rltrain.checkpoint.saved_state import PIECES
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import attention, fused, read_architecture
from rltrain.models.architecture import is_unlisted
from rltrain.models.of_roles import read_unlisted
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.training import fsdp_model
from rltrain.training.backend import BACKENDS, ModelSite
from rltrain.training.trainable import TrainedModel
from tests.distributed.cases_training import negative_log_likelihood
from tests.support import triton_interpreter
from tests.support.tiny_checkpoints import TEMPERATURE
from tests.support.tolerances import ADAM_EPS
from tests.support.trained_models import groups_on, load_experience, of_replica, send_away

NUM_STEPS = 3
SEVERAL_MICRO_BATCHES = 110
BEFORE = 2
"""Number of updates before a state is saved. One more follows."""


@dataclass(frozen=True)
class Way:
    """The settings of a training run: backend, number of ranks (the first ones), and more."""

    backend: str = "fsdp"
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    copies: int = 1
    max_tokens: int = SEVERAL_MICRO_BATCHES
    role: str = "actor"
    samples: int = 8
    model: dict[str, Any] = field(default_factory=dict)
    keep_gathered: bool = False
    on_host: bool = False
    kernels: bool = False
    """Whether Triton's interpreter runs fused kernels."""
    lora: dict[str, Any] | None = None
    """Settings of a critic's adapters."""

    @property
    def grid(self) -> Grid:
        copies = self.copies if self.backend == "fsdp" else None
        return Grid(tuple(range(self.ranks)), tp=self.tp, cp=self.cp, copies=copies)


MEGATRON = Way("megatron", tp=2, ranks=2)
WAYS = {
    "ranks1": Way(),
    "ranks3": Way(ranks=3),
    "copies2": Way(ranks=4, copies=2),
    "copies4": Way(ranks=4, copies=4),
    "keep_gathered": Way(ranks=2, keep_gathered=True, max_tokens=10_000),
    "on_host": Way(ranks=3, on_host=True),
    "recompute": Way(ranks=2, model={"recompute": "full"}),
    "recompute_outputs": Way(ranks=2, model={"recompute": "selective"}, kernels=True),
    "recompute_one_layer": Way(ranks=2, model={"recompute": {"granularity": "full", "layers": 1}}),
    "cp2_dp2": Way(ranks=4, cp=2),
    "cp4": Way(ranks=4, cp=4),
}
"""Ways with the same numbers as MEGATRON."""
TIED = ("ranks3", "cp2_dp2")
EVALUATED = ("ranks1", "ranks3", "on_host", "cp4", "critic_cp2", "bfloat16", "wide_head")
WIDE_HEAD = {"dtype": "bfloat16", "head_dtype": "float32"}
OTHERS = {
    "bfloat16": (Way(ranks=3, model={"dtype": "bfloat16"}), Way("megatron", model={"dtype": "bfloat16"})),
    "wide_head": (Way(ranks=3, model=WIDE_HEAD), Way("megatron", model=WIDE_HEAD)),
    "critic": (Way(ranks=3, role="critic"), Way("megatron", role="critic")),
    "critic_cp2": (Way(ranks=2, cp=2, role="critic"), Way("megatron", role="critic")),
    "critic_lora": (
        Way(ranks=3, role="critic", lora={"rank": 4}),
        Way("megatron", tp=2, ranks=2, role="critic", lora={"rank": 4}),
    ),
    "one_sample": (Way(ranks=3, samples=1), Way("megatron", samples=1)),
}

WITH_SPREAD_HEADS, SPREAD = ("gemma2", "mixtral"), Way(ranks=2, cp=2, samples=12)


QUICK = ("ranks1", "ranks3", "on_host", "copies2", "cp2_dp2", "critic")
"""Ways in the default suite, beside a model of one more family."""


def comparisons(checkpoints: dict[str, str], slow: bool) -> dict[str, Any]:
    """Returns the results of all quick or all slow ways, None without a part of this rank.

    Includes the ways of a tied checkpoint if there is one.
    """
    paths = {name: Path(path) for name, path in checkpoints.items()}
    pairs = (way for pair in OTHERS.values() for way in pair)
    groups = groups_on(way.grid for way in (MEGATRON, *WAYS.values(), *pairs))
    seen: dict[str, Any] = {}
    chosen = [name for name in WAYS if (name in QUICK) is not slow]
    for checkpoint, names in {"qwen3": chosen, "qwen2_tied": TIED}.items():
        if checkpoint in paths:
            evaluates = checkpoint == "qwen3"
            for name in ("megatron", *names):
                way = WAYS.get(name, MEGATRON)
                is_told = evaluates and name in ("megatron", *EVALUATED)
                with kernels() if way.kernels else nullcontext():
                    seen[f"{checkpoint}/{name}"] = trained(way, paths[checkpoint], groups, evaluates=is_told)
    for name, pair in OTHERS.items():
        if (name in QUICK) is slow:
            continue
        seen[name], seen[f"{name}/megatron"] = (
            trained(way, paths["qwen3"], groups, evaluates=name in EVALUATED) for way in pair
        )
    for dtype in ("float32", "bfloat16") if slow else ():
        way = Way(ranks=3, role="reference", model={"dtype": dtype})
        seen[f"frozen/{dtype}"] = frozen(way, paths["qwen3"], groups)
    for name in paths.keys() - {"qwen3", "qwen2_tied"}:
        way = SPREAD if name in WITH_SPREAD_HEADS else Way(ranks=3, samples=12)
        seen[f"family/{name}"] = of_family(way, paths[name], groups)
    return seen


def trained(way: Way, path: Path, groups: ProcessGroups, *, evaluates: bool) -> dict[str, Any] | None:
    """Returns the updates' reports, and with `evaluates` the log-probs before and after them."""
    if dist.get_rank() not in way.grid.ranks:
        return None
    model, experience = build(way, path, groups), share_of(way, path)
    report: dict[str, Any] = {"elements": sum(parameter.numel() for parameter in model.parameters.values())}
    if evaluates:
        report["start"] = model.evaluate(experience, max_tokens=way.max_tokens, temperature=TEMPERATURE).tolist()
    report["steps"] = [step(model, way, experience) for _ in range(NUM_STEPS)]
    if evaluates:
        report["end"] = model.evaluate(experience, max_tokens=way.max_tokens, temperature=TEMPERATURE).tolist()
        if way.role == "actor":
            _, *top = model.distributions(experience, count=3, max_tokens=way.max_tokens)
            report["top"] = [of.tolist() for of in top]
    report["response_tokens"] = int(load_experience(path).select(torch.arange(way.samples)).response_mask.sum())
    report["dp"] = way.grid.coordinates(dist.get_rank()).dp
    report["bytes"] = {name: (part.size_bytes, part.host_bytes) for name, part in model.parts.items()}
    return report


@contextmanager
def kernels() -> Iterator[None]:
    """Runs fused kernels in Triton's interpreter."""
    triton_interpreter.mend()
    with (
        patch.object(attention, "fused_kernels", lambda device: fused),
        patch.object(fsdp_model, "fused_kernels", lambda device: fused),
    ):
        yield


def of_family(way: Way, path: Path, groups: ProcessGroups) -> dict[str, float] | None:
    """Returns the differences from transformers' log-probs, loss and gradient norm."""
    if dist.get_rank() not in way.grid.ranks:
        return None
    expected = load_file(path / "expected.safetensors")
    wanted = share_of(way, path, load_experience(path).with_fields(rollout_logprobs=expected["logprobs"]))
    model = build(way, path, groups)
    found = model.evaluate(wanted, max_tokens=way.max_tokens, temperature=TEMPERATURE)
    first = step(model, way, wanted)
    return {
        "logprobs": float((found - wanted.rollout_logprobs).abs().max()),
        "loss": first["loss"] / float(expected["loss"]) - 1,
        "grad_norm": first["grad_norm"] / float(expected["grad_norm"]) - 1,
    }


def build(way: Way, path: Path, groups: ProcessGroups, state: list[Path] | None = None) -> TrainedModel:
    site = site_of(way, path, groups)
    return BACKENDS[way.backend]().trained_model(site, site.config.actor, total_updates=NUM_STEPS, state=state)


def frozen(way: Way, path: Path, groups: ProcessGroups) -> dict[str, Any] | None:
    """Returns the difference of a frozen model from transformers' log-probs, and the dtypes of its tensors."""
    if dist.get_rank() not in way.grid.ranks:
        return None
    expected = load_file(path / "expected.safetensors")["logprobs"]
    wanted = share_of(way, path, load_experience(path).with_fields(rollout_logprobs=expected))
    model = BACKENDS[way.backend]().frozen_model(site_of(way, path, groups))
    found = model.evaluate(wanted, max_tokens=way.max_tokens, temperature=TEMPERATURE)
    return {
        "difference": float((found - wanted.rollout_logprobs).abs().max()),
        "types": sorted({str(shard.dtype) for shard in model.parameters.values()}),
        "parts": list(model.parts),
    }


def site_of(way: Way, path: Path, groups: ProcessGroups) -> ModelSite:
    fsdp = schema.Fsdp(replicas=way.copies, reshard_after_forward=not way.keep_gathered)
    settings = schema.Actor(
        backend=way.backend,  # type: ignore[arg-type]
        fsdp=fsdp,
        optimizer=schema.Optimizer(
            lr=1e-2, warmup_steps=2, decay="linear", weight_decay=0.1, eps=ADAM_EPS, cpu_offload=way.on_host
        ),
        micro_batch_tokens=way.max_tokens,
        parallel=schema.Parallel(tp=way.tp, cp=way.cp),
    )
    config = schema.Config(
        steps=1,
        placement={"actor": "all"},
        model=schema.Model(path=str(path), **{"dtype": "float32", **way.model}),
        data={"train": {"path": "none"}},  # type: ignore[arg-type]
        actor=settings,
        critic=schema.Critic(lora=way.lora),  # type: ignore[arg-type]
    )
    architecture = read_unlisted(path) if is_unlisted(path) else read_architecture(path)
    return ModelSite(
        config,
        way.role,
        World(dist.get_rank(), dist.get_world_size(), 0, 4, torch.device("cpu"), dist.HashStore(), 60.0),
        way.grid,
        groups,
        architecture.value_model() if way.role == "critic" else architecture,
        on_micro_batch=lambda lengths, before, backward: None,
    )


def share_of(way: Way, path: Path, experience: Experience | None = None) -> Experience:
    samples = (experience or load_experience(path)).select(torch.arange(way.samples))
    if way.role == "critic":
        tokens = samples.tokens.float()
        samples = samples.with_fields(values=torch.zeros_like(tokens), returns=tokens % 7 - 3)
    return of_replica(samples, way.grid)


def step(model: TrainedModel, way: Way, experience: Experience) -> dict[str, float]:
    loss = negative_log_likelihood if way.role == "actor" else of_states(value_loss(0.2))
    return model.train_batch(experience, loss, temperature=TEMPERATURE)


STATES = {
    "copies2": (Way(ranks=4, copies=2), Way(ranks=4, copies=2)),
    "on_host": (Way(ranks=2, on_host=True), Way(ranks=2, on_host=True)),
    "ranks4_to_ranks3": (Way(ranks=4), Way(ranks=3)),
    "fsdp_to_megatron": (Way(ranks=3), MEGATRON),
    "megatron_to_fsdp": (MEGATRON, Way(ranks=3)),
    "bfloat16_to_megatron": (
        Way(ranks=3, model={"dtype": "bfloat16"}),
        Way("megatron", ranks=2, model={"dtype": "bfloat16"}),
    ),
}


def states(checkpoint: str, folder: str) -> dict[str, Any]:
    """Saves a run, continues it in another way and back in the first, and returns the reports beside an unbroken
    run's."""
    path = Path(checkpoint)
    groups = groups_on(way.grid for pair in STATES.values() for way in pair)
    return {name: _continued(*STATES[name], path, groups, Path(folder, name)) for name in STATES}


def _continued(way: Way, other: Way, path: Path, groups: ProcessGroups, folder: Path) -> dict[str, Any]:
    rank, seen = dist.get_rank(), dict[str, Any]()
    if rank in way.grid.ranks:
        first, experience = build(way, path, groups), share_of(way, path)
        for _ in range(BEFORE):
            step(first, way, experience)
        send_away(first)  # the state can be saved from the host too
        _save(first, folder / "first")
        for name, part in first.parts.items():
            part.allocate()
            part.fill(rewritten=name == "gradients")
        seen["undisturbed"] = step(first, way, experience)
    dist.barrier()
    for number, (before, after, then) in enumerate([("first", "second", other), ("second", "third", way)]):
        if rank in then.grid.ranks:
            resumed = build(then, path, groups, sorted((folder / before).glob("*.safetensors")))
            goes_on = partial(step, resumed, then, share_of(then, path))
            seen[f"resumed{number}"] = _save(resumed, folder / after, meanwhile=goes_on)
        dist.barrier()
    return seen


def _save(model: TrainedModel, folder: Path, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Saves the state twice into the same memory and writes it after `meanwhile`. Returns the result of `meanwhile`."""
    first = dict(model.save_state().tensors)
    saved = model.save_state()
    result = meanwhile()
    assert all(saved.tensors[name] is values for name, values in first.items() if name != PIECES)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(saved.tensors), folder / f"rank_{dist.get_rank():05d}.safetensors", dict(saved.metadata))
    return result
