"""What a model's optimizer keeps of every parameter, whichever class of optimizer it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rltrain.training.megatron.model import LanguageModel, learned_parameters
from rltrain.training.megatron.optimizer import members
from rltrain.training.megatron.stepping import first_of, masters, stepping
from rltrain.training.optimizers import ADAM_STATES, MUON_STATES

MOMENTS = (*ADAM_STATES, *MUON_STATES)
"""Of AdamW, and of what Muon moves."""


@dataclass(frozen=True)
class Optimized:
    """What the optimizer works on of one parameter: its elements from `first`, flattened.

    `master` is fp32: the weights themselves or a copy; `part` is the one of the model's training_parts that it lies in.
    A shard is this rank's alone among those with the same parameter; else all have the same. `moments` by their names,
    some of MOMENTS, none before the first step.
    """

    master: Tensor
    first: int
    is_shard: bool
    part: str
    moments: Mapping[str, Tensor]


def optimized_parameters(model: LanguageModel, optimizer: MegatronOptimizer) -> dict[str, Optimized]:
    """By the names of `learned_parameters`. Those of which a distributed optimizer has no share here are missing."""
    names = {id(parameter): name for name, parameter in learned_parameters(model).items()}
    found: dict[str, Optimized] = {}
    for member in members(optimizer):
        is_shard, own = isinstance(member, DistributedOptimizer), stepping(member)
        for parameter, key in masters(member):
            part = "weights" if parameter.dtype == torch.float32 else "master_weights"
            state = member.state.get(key, {})
            moments = {moment: state[moment] for moment in MOMENTS if moment in state}
            master = own.master(key) if own else key
            found[names[id(parameter)]] = Optimized(master, first_of(member, parameter), is_shard, part, moments)
    return found


def step_count(optimizer: MegatronOptimizer) -> Tensor | int:
    """How many steps the optimizer has made: a number, or a tensor among its states. 0 also where it has no shares."""
    if own := stepping(members(optimizer)[0]):
        return own.num_steps
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return next((group["step"] for group in optimizer.param_groups if "step" in group), 0)
    # Every parameter has a gradient in every step, so one's count is that of all.
    return next((state["step"] for _, state in optimizer.state.items()), 0)


def optimizer_name(optimizer: MegatronOptimizer) -> str:
    """As config key optimizer.name has it."""
    own = stepping(members(optimizer)[0])
    return own.settings.name if own else "adamw"


def make_states(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Zero moments as the optimizer would make them in its first step, counted as after `num_steps`."""
    for member in members(optimizer):
        if own := stepping(member):
            own.make_states(num_steps)
            continue
        for group in member.param_groups:
            if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
                group["step"] = num_steps
            for master in group["params"]:
                state: dict[str, Any] = {moment: torch.zeros_like(master) for moment in ADAM_STATES}
                if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
                    on_device = group["fused"] or group["capturable"]
                    state["step"] = torch.tensor(float(num_steps), device=master.device if on_device else "cpu")
                member.state[master] = state
