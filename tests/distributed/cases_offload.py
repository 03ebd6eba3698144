"""The ranks of test_offload: a model is trained, scored and moved off the device between its tasks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import likelihood_loss
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart, OverlayPart
from rltrain.offload.offload import Offloader
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.schedule.order import Order
from rltrain.tasks.roles import needs_of
from rltrain.training.megatron.backend import EvaluableModel, TrainableModel
from tests.support.trained_models import CPU, digest, groups_on, load_experience, megatron_model, of_replica
from tests.support.uneven_products import uneven_products

NUM_STEPS = 2
GRID = Grid((0, 1))
MAX_TOKENS = 100
WAYS = {
    f"{dtype}/{kind}": (dtype, kind == "distributed")
    for dtype in ("float32", "bfloat16")
    for kind in ("plain", "distributed")
}
"""Dtype of the weights, and whether the optimizer is distributed."""
LEAVES, SWAPPED, AHEAD = "leaves", "leaves_with_swapped_reference", "leaves_fetched_ahead"
STAYS_SWAPPED = "stays_with_swapped_reference"
MODES = {
    "float32/plain": ("stays", LEAVES),
    "float32/distributed": ("stays", SWAPPED),
    "bfloat16/plain": ("stays", SWAPPED),
    "bfloat16/distributed": ("stays", LEAVES, SWAPPED, AHEAD, STAYS_SWAPPED),
}
STEP = ("generate", "reference_logprobs", "actor_logprobs", "accumulate", "generate", "accumulate", "update")
"""Gradients of the first half of a mini-batch are off the device while the engine decodes."""


@dataclass(frozen=True)
class Entry:
    name: str
    step: int
    kind: str = "task"
    final: bool = False
    roles: tuple[str, ...] = field(default=("actor", "reference", "rollout"))


class RoomyMemory(DeviceMemory):
    def spare_bytes(self, task: str) -> int:
        return 2**40


class Rank:
    """One rank's actor, reference and a stand-in for an engine, under one residency."""

    def __init__(self, path: Path, mode: str, groups: ProcessGroups, dtype: str, distributed_optimizer: bool) -> None:
        torch.manual_seed(0)
        self.order = [Entry(name, step) for step in range(NUM_STEPS) for name in STEP]
        swapped = mode.endswith("swapped_reference")
        offload = dict.fromkeys(("actor", "reference", "rollout"), "auto" if mode.startswith("leaves") else False)
        memory = (RoomyMemory if mode == AHEAD else DeviceMemory)(CPU)
        self.residency = Offloader(Order.of(self.order), offload, memory, guests=["reference"] if swapped else [])

        model = megatron_model(path, GRID, groups, dtype=dtype)
        settings = schema.Actor(
            optimizer=schema.Optimizer(lr=1e-2, weight_decay=0.1),
            micro_batch_tokens=MAX_TOKENS,
            distributed_optimizer=distributed_optimizer,
            overlap=mode.startswith("leaves"),  # as on GPUs with offloaded roles
        )
        self.actor = TrainableModel(model, settings, total_updates=NUM_STEPS)
        self.residency.admit("actor", self.actor.parts)
        if swapped:
            self.reference: EvaluableModel = self.actor
            parameters = self.actor.parameters
            host = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in parameters.items()}
            load_parameters(path, model.layout, dist.get_rank(), host)
            overlay = OverlayPart(self.actor.parts["weights"], list(parameters.values()), list(host.values()))
            self.residency.admit("reference", {"weights": overlay})
        else:
            self.reference = EvaluableModel(megatron_model(path, GRID, groups, dtype=dtype))
            self.residency.admit("reference", self.reference.parts)
        self.engine = [torch.randn(1000)]
        rest = {part: MemoryPart(list) for part in ("kv_cache", "base")}
        self.residency.admit("rollout", {"weights": MemoryPart(lambda: self.engine), **rest})

    def run(self, experience: Experience) -> dict[str, Any]:
        halves = experience.select(torch.arange(3)), experience.select(torch.arange(3, 6))
        seen: dict[str, Any] = {name: [] for name in ("logprobs", "reference_logprobs", "engine", "updates", "empty")}
        for position, entry in enumerate(self.order):
            self.residency.enter(position)
            seen["empty"].append(self._away_is_empty(entry.name))
            if entry.name == "generate":
                seen["engine"].append(digest(self.engine))
            elif entry.name == "accumulate":
                self.actor.accumulate(halves[self._num_accumulated(position)], likelihood_loss())
            elif entry.name == "update":
                seen["updates"].append(self.actor.step())
            else:
                model = self.reference if entry.name == "reference_logprobs" else self.actor
                values = model.evaluate(experience, max_tokens=MAX_TOKENS)
                seen[entry.name.removeprefix("actor_")].append(digest([values]))
        seen["weights"] = digest(self.actor.model.parameters())
        seen["states"] = self._digest_of_states()
        seen["metrics"] = self.residency.metrics()
        return seen

    def _num_accumulated(self, position: int) -> int:
        step = self.order[position].step
        return sum(e.name == "accumulate" and e.step == step for e in self.order[:position])

    def _away_is_empty(self, task: str) -> bool:
        """Returns whether the task's own parts hold their memory and all other parts hold none."""
        parts = self.residency.parts
        needed = {key for key in needs_of(task).parts if key in parts}
        beneath = {id(parts[key].beneath) for key in needed}
        away = [part for key, part in parts.items() if key not in needed and part.beneath is None]
        return all(part.allocated_bytes == 0 for part in away if id(part) not in beneath) and all(
            parts[key].allocated_bytes == parts[key].size_bytes for key in needed
        )

    def _digest_of_states(self) -> str:
        """Returns a digest of the optimizer states. Brings offloaded parts back first."""
        for name in ("master_weights", "optimizer"):
            part = self.residency.parts["actor", name]
            if part.place == "host":
                part.allocate()
                part.fill()
        optimizer = self.actor.optimizer
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [value for _, state in optimizer.state.items() for value in state.values()]
        return digest([*masters, *(state for state in states if isinstance(state, Tensor))])


def train_in_every_way(path: str) -> dict[str, Any]:
    """Returns the observations by way, then by mode."""
    groups, experience = groups_on([GRID]), of_replica(load_experience(Path(path)), GRID)
    with uneven_products():
        return {
            way: {mode: Rank(Path(path), mode, groups, dtype, is_distributed).run(experience) for mode in MODES[way]}
            for way, (dtype, is_distributed) in WAYS.items()
        }
