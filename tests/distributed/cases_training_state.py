"""The ranks of test_training_state: runs are saved and resumed in the same layout or another, in one world."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, likelihood_loss, of_states, value_loss
from rltrain.checkpoint.saved_state import MASTER, PIECES, Destination, SavedState
from rltrain.config import schema
from rltrain.models import Architecture, read_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import step_count
from rltrain.training.megatron.model import ROUTER_BIAS, local_parameters
from rltrain.training.optimizers import ADAM_STATES
from rltrain.training.trainable import MOMENTS
from tests.support.trained_models import (
    blank_model,
    digest,
    groups_on,
    in_training,
    load_experience,
    megatron_model,
    of_replica,
    send_away,
)
from tests.support.uneven_products import uneven_products

WORLD_SIZE = 4
BEFORE, AFTER = 2, 1
"""Updates before and after the save. If one update's numbers and states are equal, a second adds nothing."""
MAX_TOKENS = 200
NUM_SAMPLES = 8
BUCKET_MB = 0.05
"""Gives the tiny model several buckets."""
BALANCED = schema.MoE(aux_loss_coef=0.01, bias_update_rate=0.01)
SAMPLED = 20_000
"""Elements of a state that are checked individually."""


@dataclass(frozen=True)
class Way:
    """The settings of a run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dtype: str = "float32"
    distributed: bool = True
    overlap: bool = False
    vpp: int = 1
    layers: tuple[int, ...] | None = None
    optimizer: tuple[tuple[str, Any], ...] = ()
    """Additional keys of the optimizer's settings."""

    @property
    def grid(self) -> Grid:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "vpp": self.vpp}
        return Grid(tuple(range(self.tp * self.pp * self.cp * self.dp)), layers_per_stage=self.layers, **sizes)


@dataclass(frozen=True)
class Case:
    """A run in one way that is resumed in another (None: in the same)."""

    way: Way
    other: Way | None = None
    checkpoint: str = "qwen3"
    role: str = "actor"
    away: bool = False
    """Whether the state is on the host during the save."""

    @property
    def goes_on(self) -> Way:
        return self.other or self.way


CASES = {
    "dp2_plain_bf16": Case(Way(dp=2, dtype="bfloat16", distributed=False), away=True),
    "pp2_dp2_tied": Case(Way(pp=2, dp=2), checkpoint="qwen2_tied"),
    "tp2_pp2_tied_bf16": Case(Way(tp=2, pp=2, dtype="bfloat16"), checkpoint="qwen2_tied"),
    "tp2_dp2_overlap": Case(Way(tp=2, dp=2, dtype="bfloat16", overlap=True), away=True),
    "critic_tp2_dp2": Case(Way(tp=2, dp=2), role="critic", away=True),
    "tp2_pp2_to_dp4": Case(Way(tp=2, pp=2), Way(dp=4)),
    "dp4_overlap_to_dp2": Case(Way(dp=4, overlap=True), Way(dp=2, overlap=True)),
    "plain_to_distributed": Case(Way(tp=2, dp=2, distributed=False), Way(pp=2, dp=2)),
    "distributed_to_plain": Case(Way(tp=2, dp=2), Way()),
    "bf16_tp2_dp2_to_pp2": Case(Way(tp=2, dp=2, dtype="bfloat16"), Way(pp=2, dtype="bfloat16")),
    "bf16_to_float32": Case(Way(dp=2, dtype="bfloat16"), Way(tp=2)),
    "interleaved_to_tp2_tied": Case(Way(pp=3, vpp=2, layers=(1, 0, 0, 0, 1, 0)), Way(tp=2), checkpoint="qwen2_tied"),
    "critic_pp2_dp2_to_tp2": Case(Way(pp=2, dp=2), Way(tp=2), role="critic"),
}
QUICK = (
    *("pp2_dp2_tied", "tp2_dp2_overlap", "critic_tp2_dp2"),
    *("tp2_pp2_to_dp4", "distributed_to_plain", "bf16_tp2_dp2_to_pp2", "interleaved_to_tp2_tied"),
)
WITH_EXPERTS = {
    "experts": Case(Way(tp=2, dp=2, ep=4, etp=1), checkpoint="deepseek_v3", away=True),
    "experts_bf16_overlap": Case(Way(dp=4, ep=2, dtype="bfloat16", overlap=True), checkpoint="deepseek_v3", away=True),
    "experts_dp4_ep2_to_tp2_dp2_etp1": Case(Way(dp=4, ep=2), Way(tp=2, dp=2, etp=1), checkpoint="deepseek_v3"),
    "experts_cp2_dp2_ep4_to_tp2": Case(Way(cp=2, dp=2, ep=4), Way(tp=2), checkpoint="deepseek_v3"),
    "experts_plain_to_pp2_dp2_ep2": Case(
        Way(tp=2, dp=2, ep=2, distributed=False), Way(pp=2, dp=2, ep=2), checkpoint="deepseek_v3"
    ),
}


class Run:
    """This rank's share of a model in training. `experience` is the share of its replica."""

    def __init__(self, case: Case, way: Way, path: Path, groups: ProcessGroups, *, load_weights: bool) -> None:
        self.rank, self.grid = dist.get_rank(), way.grid
        self.loss: LossFunction = likelihood_loss() if case.role == "actor" else of_states(value_loss(0.2))
        make = megatron_model if load_weights else blank_model
        model = make(path, self.grid, groups, architecture=architecture_of(case, path), dtype=way.dtype, moe=BALANCED)
        for parameter in () if load_weights else local_parameters(model).values():
            parameter.data.fill_(float("nan"))
        self.trained = in_training(
            model,
            updates=BEFORE + AFTER,
            max_tokens=MAX_TOKENS,
            optimizer={"lr": 1e-3, "warmup_steps": 2, "decay": "linear", "weight_decay": 0.1, **dict(way.optimizer)},
            distributed_optimizer=way.distributed,
            overlap=way.overlap,
            gradient_bucket_mb=BUCKET_MB if way.overlap else None,
        )
        samples = load_experience(path)
        if case.role == "critic":
            tokens = samples.tokens.float()
            samples = samples.with_fields(values=torch.zeros_like(tokens), returns=tokens % 7 - 3)
        samples = samples.select(torch.arange(NUM_SAMPLES))
        self.response_tokens = int(samples.response_mask.sum())
        self.experience = of_replica(samples, self.grid)

    def train(self, updates: int) -> list[dict[str, float]]:
        return [self.trained.train_batch(self.experience, self.loss) for _ in range(updates)]

    def save(self, folder: Path, *, updates_meanwhile: int = 0) -> None:
        """Saves twice into the same memory. The state is written after `updates_meanwhile`."""
        first = self.trained.save_state()
        copies = {name: values for name, values in first.tensors.items() if name != PIECES}
        for values in copies.values():
            values.fill_(-7)
        saved = self.trained.save_state()
        self.train(updates_meanwhile)
        assert all(saved.tensors[name] is copy for name, copy in copies.items()), "no new memory is taken"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(saved.tensors), folder / f"rank_{self.rank:05d}.safetensors", dict(saved.metadata))

    def load(self, folder: Path) -> None:
        self.trained.load_state(sorted(folder.glob("*.safetensors")))

    def go_on(self) -> dict[str, Any]:
        return {"updates": self.train(AFTER), "digests": self.digests()}

    def digests(self) -> dict[str, str]:
        """Returns digests of the weights and of the optimizer's states, by kind."""
        optimizer = self.trained.optimizer
        optimized = self.trained.optimized()
        found = [optimized[name] for name in sorted(optimized)]
        held = [kind for kind in MOMENTS if any(kind in one.moments for one in found)]
        kinds = {kind: digest(one.moments[kind] for one in found if kind in one.moments) for kind in held}
        steps = digest(state["step"] for _, state in optimizer.state.items() if "step" in state)
        kinds["step"] = f"{int(step_count(optimizer))} {steps}"
        return {
            "weights": digest(self.trained.parameters.values()),
            MASTER: digest(one.master for one in found),
            **kinds,
        }


def architecture_of(case: Case, path: Path) -> Architecture:
    architecture = read_architecture(path)
    return architecture if case.role == "actor" else architecture.value_model()


def layout_of(case: Case, way: Way, path: Path) -> Layout:
    return megatron_layout(architecture_of(case, path), way.grid, dtype=way.dtype)


def some_cases(checkpoints: dict[str, str], folder: str, names: list[str]) -> dict[str, Any]:
    """Returns the results of each case with a part of this rank in either half."""
    cases = {name: (CASES | WITH_EXPERTS)[name] for name in names}
    groups = groups_of(cases)
    with uneven_products():
        return {
            name: saved_and_continued(case, Path(checkpoints[case.checkpoint]), groups, Path(folder, name))
            for name, case in cases.items()
        }


def groups_of(cases: Mapping[str, Case]) -> ProcessGroups:
    return groups_on(way.grid for case in cases.values() for way in (case.way, case.goes_on))


def quick_cases(checkpoints: dict[str, str], folder: str) -> dict[str, Any]:
    """Returns the results of each quick case, and of some further cases by name."""
    results = some_cases(checkpoints, folder, list(QUICK))
    groups = groups_of(CASES)
    with uneven_products():
        results["at_the_start"] = at_the_start(Path(checkpoints["qwen3"]), groups, Path(folder, "at_the_start"))
    results["within_a_mini_batch"] = within_a_mini_batch(Path(checkpoints["qwen3"]), groups)
    return results


def saved_and_continued(case: Case, path: Path, groups: ProcessGroups, folder: Path) -> dict[str, Any]:
    rank, seen = dist.get_rank(), {}
    if rank in case.way.grid.ranks:
        undisturbed = Run(case, case.way, path, groups, load_weights=True)
        undisturbed.train(BEFORE)
        if case.other is not None:  # its numbers are compared with a tolerance
            undisturbed.save(folder / "first")
        seen["undisturbed"] = undisturbed.go_on()
        if case.other is None:
            stopped = Run(case, case.way, path, groups, load_weights=True)
            stopped.train(BEFORE)
            if case.away:
                send_away(stopped.trained)
            stopped.save(folder / "first", updates_meanwhile=0 if case.away else 1)
    dist.barrier()
    if rank in case.goes_on.grid.ranks:
        resumed = Run(case, case.goes_on, path, groups, load_weights=False)
        resumed.load(folder / "first")
        seen["response_tokens"] = resumed.response_tokens
        seen["num_updates"] = resumed.trained.num_updates
        seen["shared_steps"] = shared_steps(resumed)
        resumed.save(folder / "second")
        seen["resumed"] = resumed.go_on()
    dist.barrier()
    if rank == 0:
        first, second = (whole_state(case, path, folder / name) for name in ("first", "second"))
        seen["equal_states"] = {kind: torch.equal(first[kind], second[kind]) for kind in first}
        seen["distinct_values"] = {kind: len(values[:SAMPLED].unique()) for kind, values in first.items()}
    return seen


def whole_state(case: Case, path: Path, folder: Path) -> dict[str, Tensor]:
    """Returns all elements of a state by kind, in the order of one rank with the whole model."""
    on = layout_of(case, Way(), path).on(0)
    moment = getattr(torch, dict(case.way.optimizer).get("moments_dtype", "float32"))
    types = {MASTER: torch.float32, **dict.fromkeys(ADAM_STATES, moment)}
    whole = {k: [torch.zeros(shape, dtype=types[k]).view(-1) for _, shape in on.parameters] for k in types}
    saved = SavedState(sorted(folder.glob("*.safetensors")), layout_of(case, Way(), path).tensors)
    is_optimized = np.array([not name.endswith(ROUTER_BIAS) for name, _ in on.parameters])
    optimized = on.pieces[is_optimized[on.pieces["parameter"]]]
    saved.read([Destination(k, on.pieces if k == MASTER else optimized, flats) for k, flats in whole.items()])
    return {kind: torch.cat(flats) for kind, flats in whole.items()}


def shared_steps(run: Run) -> bool:
    """Returns whether two parameters share one tensor for their step counts."""
    steps = [state["step"] for _, state in run.trained.optimizer.state.items() if "step" in state]
    return len({step.data_ptr() for step in steps}) != len(steps)


def at_the_start(path: Path, groups: ProcessGroups, folder: Path) -> dict[str, Any]:
    """Saves before the first update, without states in the optimizer."""
    case = Case(Way(tp=2, dp=2), Way(tp=2, dp=2))
    undisturbed = Run(case, case.way, path, groups, load_weights=True)
    undisturbed.save(folder)
    dist.barrier()
    resumed = Run(case, case.way, path, groups, load_weights=False)
    resumed.load(folder)
    return {"undisturbed": undisturbed.go_on(), "resumed": resumed.go_on()}


def within_a_mini_batch(path: Path, groups: ProcessGroups) -> str:
    case = Case(Way(tp=2, dp=2))
    run = Run(case, case.way, path, groups, load_weights=True)
    run.trained.accumulate(run.experience, run.loss)
    try:
        run.trained.save_state()
    except RuntimeError as error:
        return str(error)
    return "no error"
