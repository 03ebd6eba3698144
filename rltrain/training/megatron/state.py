"""The training state of a model, saved and loaded through layouts: master weights, the optimizer's moments, its steps.
Of a model with adapters it is theirs: the base is in its checkpoint.

Every element is saved by one rank, so a state can be loaded in any other layout, with or without a distributed
optimizer.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.models.experts import is_expert
from rltrain.models.table import IntArray
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.training.megatron.model import ROUTER_BIAS, LanguageModel, learned_layout, learned_parameters
from rltrain.training.megatron.optimizer import first_of, masters, members, stepping
from rltrain.training.optimizers import ADAM_STATES, MUON_STATES
from rltrain.training.shards import answered_for, sharing_groups, within
from rltrain.training.trainable import LateCopies, LateTensors

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


Range = tuple[int, int]
"""(start, stop) in a flattened parameter."""


def save_state(
    model: LanguageModel,
    optimizer: MegatronOptimizer,
    parts: Mapping[str, MemoryPart],
    num_updates: int,
    loss_scale: str,
    copies: MutableMapping[str, Tensor],
    late: LateCopies,
) -> Contents:
    """The share of the training state that this rank answers for, read where it lies: on the device or on the host.

    `parts` are the model's. `copies` is empty at the first save and given again at the next, which writes over the
    tensors of the one before. What they are given is left to `late`. RuntimeError where a part was dropped. Not
    collective.
    """
    layout, rank = learned_layout(model), dist.get_rank()
    names, kept = _parameter_names(layout, rank), _kept_parameters(model, optimizer)
    shares, tables = dict[str, Range](), []
    for groups, of_experts in zip(sharing_groups(model.grid), (False, True), strict=True):
        mine = next(ranks for ranks in groups if rank in ranks)
        of_kind = {name: one for name, one in kept.items() if is_expert(name) == of_experts}
        cut = {name: _share(one, mine.index(rank), len(mine)) for name, one in of_kind.items()}
        tables.append(within(answered_for(layout, rank, groups), *_limits(names, cut)))
        shares |= cut
    pieces, flats = np.concatenate(tables), dict[str, Tensor]()

    def copy(kind: str, name: str, part: str, values: Tensor, first: int, count: int) -> None:
        flat = flat_name(kind, name)
        flats[flat] = late.add(parts[part], values, first, count, copies.get(flat))

    late.begin()
    for name in (names[number] for number in np.unique(pieces["parameter"])):
        one, (start, stop) = kept[name], shares[name]
        first, count = start - one.first, stop - start
        copy(MASTER, name, one.part, one.master, first, count)
        for moment, values in one.moments.items():
            copy(moment, name, "optimizer", values, first, count)
    copies.update(flats)
    steps = step_count(optimizer)
    if isinstance(steps, Tensor):
        steps = int(parts["optimizer"].read(steps))
    counts = Counts(num_updates, steps, loss_scale, optimizer_name(optimizer))
    saved = contents(layout.tensors, names, pieces, flats, counts)
    return Contents(LateTensors(saved.tensors, late), saved.metadata)


def _kept_parameters(model: LanguageModel, optimizer: MegatronOptimizer) -> dict[str, Optimized]:
    """What the optimizer works on, and the routers' biases, which follow the experts' loads."""
    biases = {name: bias for name, bias in learned_parameters(model).items() if name.endswith(ROUTER_BIAS)}
    kept = {name: Optimized(bias, 0, is_shard=False, part="weights", moments={}) for name, bias in biases.items()}
    return kept | optimized_parameters(model, optimizer)


def load_state(model: LanguageModel, optimizer: MegatronOptimizer, files: Sequence[AnyFile], role: str) -> Counts:
    """Take over a training state from the files of all ranks that saved it, whatever their layout was; its counts.

    Fills weights, master weights and moments of a model that has made no optimizer step and is on the device; of the
    files only what this rank needs is read. CheckpointError where one is missing or damaged, where they do not belong
    together or to a model of these tensors or to another optimizer, and where they lack a part of one. `role` is for
    messages. Not collective.
    """
    saved = SavedState(files, learned_layout(model).tensors)
    saved.require_optimizer(optimizer_name(optimizer), role)
    if saved.counts.optimizer_steps:
        make_states(optimizer, saved.counts.optimizer_steps)
    saved.read(list(_destinations(model, optimizer, with_moments=saved.counts.optimizer_steps > 0)))
    return saved.counts


def _destinations(model: LanguageModel, optimizer: MegatronOptimizer, *, with_moments: bool) -> Iterator[Destination]:
    rank = dist.get_rank()
    layout, weights = learned_layout(model), learned_parameters(model)
    names, pieces = _parameter_names(layout, rank), layout.on(rank).pieces
    yield Destination(MASTER, pieces, [weights[name].detach().view(-1) for name in names])

    optimized = optimized_parameters(model, optimizer)
    held = {name: (one.first, one.first + one.master.numel()) for name, one in optimized.items()}
    copies = {name: one.master for name, one in optimized.items() if one.part != "weights"}
    kinds = [(MASTER, copies)]
    if with_moments:
        for moment in MOMENTS:
            kept = {name: one.moments[moment] for name, one in optimized.items() if moment in one.moments}
            kinds += [(moment, kept)] if kept else []
    for kind, tensors in kinds:
        cut = within(pieces, *_limits(names, {name: held[name] for name in tensors}))
        yield Destination(kind, cut, [tensors[name].detach().view(-1) if name in tensors else None for name in names])


def _parameter_names(layout: Layout, rank: int) -> list[str]:
    return [name for name, _ in layout.on(rank).parameters]


def _share(one: Optimized, index: int, replicas: int) -> Range:
    """What rank number `index` of as many that share a parameter saves of it."""
    count = one.master.numel()
    if one.is_shard:
        return one.first, one.first + count
    return count * index // replicas, count * (index + 1) // replicas


def _limits(names: Sequence[str], ranges: Mapping[str, Range]) -> tuple[IntArray, IntArray]:
    """(starts, stops) by parameter: nothing of those that have no range."""
    limits = np.array([ranges.get(name, (0, 0)) for name in names], dtype=np.int64).reshape(-1, 2)
    return limits[:, 0], limits[:, 1]
