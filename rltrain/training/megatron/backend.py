"""Megatron as a training backend: a model with gradients, optimizer, memory and state."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, sample_shares
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.config import schema
from rltrain.config.schema import Trained
from rltrain.data.experience import Experience
from rltrain.models.experts import is_expert
from rltrain.models.table import IntArray
from rltrain.offload.memory_parts import MemoryPart, PartOnHost
from rltrain.reshard.layout import Layout
from rltrain.runtime.group_messages import broadcast_json
from rltrain.training.adapters import MadeWeights, begin_adapters
from rltrain.training.backend import SKIPPED, ModelSite
from rltrain.training.fake_quantization import rounded_weights
from rltrain.training.megatron.experts import Routers
from rltrain.training.megatron.forward import BaseModel, EvaluableModel, make_micro_batches, run_schedule
from rltrain.training.megatron.lora import Adapters
from rltrain.training.megatron.model import (
    ROUTER_BIAS,
    LanguageModel,
    adapters_layout_of_model,
    add_adapters,
    build_model,
    layout_of_model,
    learned_layout,
    learned_parameters,
    local_parameters,
)
from rltrain.training.megatron.optimizer import (
    GradientReduction,
    MegatronLossScale,
    ParameterGather,
    build_optimizer,
    data_parallel_config,
    first_of,
    is_replaced,
    masters,
    members,
    replace_steps,
    stepping,
)
from rltrain.training.megatron.prediction import with_loss
from rltrain.training.megatron.versions import data_parallel
from rltrain.training.optimizers import ADAM_STATES, MUON_STATES
from rltrain.training.shards import answered_for, sharing_groups, within
from rltrain.training.trainable import (
    DIVISOR,
    NUM_SAMPLES,
    LateCopies,
    LateTensors,
    Pending,
    SkippedSteps,
    Trainable,
    learning_rate,
)

# What a model's optimizer keeps of every parameter, whichever class of optimizer it is.

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


# The training state of a model, saved and loaded through layouts: master weights, the optimizer's moments, its steps.
# Of a model with adapters it is theirs: the base is in its checkpoint.
#
# Every element is saved by one rank, so a state can be loaded in any other layout, with or without a distributed
# optimizer.

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


# What training holds on the device beside the weights, in the parts that come and go on their own.


def training_parts(
    model: LanguageModel, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[str, MemoryPart]:
    """master_weights, optimizer and gradients, none of which shares memory with another or with the weights.

    With fp32 weights the optimizer works on these themselves, and master_weights is empty. What an optimizer with
    cpu_offload has on the host belongs to the parts and stays there.
    """
    owned = [own for member in members(optimizer) if (own := stepping(member))]
    return {
        "master_weights": PartOnHost(
            lambda: _master_weights(model, optimizer), [master for own in owned for master in own.host_masters()]
        ),
        "optimizer": PartOnHost(lambda: _states(optimizer), [state for own in owned for state in own.host_states()]),
        # Beside the buffers Megatron keeps fp32 gradients of the master weights until it makes the next ones.
        "gradients": MemoryPart(lambda: _gradients(chunks), forget=lambda: optimizer.zero_grad(set_to_none=True)),
    }


def _master_weights(model: LanguageModel, optimizer: MegatronOptimizer) -> list[Tensor]:
    """What the optimizer works on, but for views of the weights, and for keys whose masters are on the host."""
    weights = {_storage(parameter) for parameter in model.parameters()}
    found = []
    for member in members(optimizer):
        own = stepping(member)
        keys = (key for group in member.param_groups for key in group["params"])
        found += [key for key in keys if _storage(key) not in weights and not (own and own.has_host_master(key))]
    return found


def _states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Moments and step counts; none before the first step."""
    for _, state in optimizer.state.items():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _storage(tensor: Tensor) -> int:
    """Tells storages apart, also those that are empty at the moment."""
    return tensor.untyped_storage()._cdata


# A model together with its gradients and optimizer.


class TrainableModel(EvaluableModel, Trainable):
    """As training.backend.TrainedModel describes it: data-parallel gradients, optimizer and learning-rate schedule
    around a model whose weights are loaded, unless `load_state` follows. `role` is for messages."""

    def __init__(
        self,
        model: LanguageModel,
        settings: schema.Trained,
        *,
        total_updates: int,
        max_skipped: int = 0,
        role: str = "actor",
    ) -> None:
        """Collective over: the role's ranks."""
        super().__init__(model)
        self.settings, self.role, self.skipped = settings, role, SkippedSteps(role, max_skipped)
        self.total_updates = total_updates
        self.num_updates = 0
        self.predicts = model.architecture.predicts
        self.groups = model.pg_collection
        parallel = data_parallel_config(settings, self.groups.dp_cp.size(), model.device)
        self.chunks = [data_parallel(model.config, parallel, chunk, self.groups) for chunk in model.chunks]
        architecture = model.architecture
        self.routers = Routers(model, architecture, model.moe, self.groups) if architecture.moe else None
        self.reduction, self.gather = GradientReduction(self.chunks), ParameterGather(self.chunks)
        self.optimizer = build_optimizer(self.chunks, settings.optimizer, self.groups)
        if is_replaced(settings.optimizer):
            replace_steps(model, self.optimizer, settings.optimizer)
        self.loss_scale = MegatronLossScale(self.optimizer, model.config)
        # Else Megatron's schedules would reduce the gradients after every part of a mini-batch.
        model.config.finalize_model_grads_func = None
        self.parts = {**self.parts, **training_parts(model, self.chunks, self.optimizer)}
        self.served = rounded_weights(self.parameters, model.options.model.fake_quantization, model.config.params_dtype)
        self.copy_late()
        self._copies: dict[str, Tensor] = {}
        self._pending: Pending | None = None

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        metrics = []
        try:
            for experience in mini_batches:
                self._accumulate(experience, loss_function, temperature, is_whole=True)
                metrics.append(self._step())
        finally:
            self.gather.finish()
        return metrics

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Collective over: this replica."""
        # Other roles may have the device, and the gradients may leave it, before the next part or the step follows.
        self._accumulate(experience, loss_function, temperature, is_whole=False)

    def _accumulate(
        self, experience: Experience, loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> None:
        """Of a whole mini-batch reducing begins meanwhile."""
        if self._pending is None:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._pending = Pending()
        self._pending.count(experience)
        loss = self.loss_of(loss_function, temperature)
        micro_batches = make_micro_batches(self.model, experience, self.settings.micro_batch_tokens)
        if micro_batches:
            if is_whole:
                self.reduction.expect(len(micro_batches))
            shares = partial(sample_shares, loss_function)
            with self._drawing(self._pending.num_parts):
                self._pending.outputs += run_schedule(
                    self.model,
                    micro_batches,
                    loss,
                    chunks=self.chunks,
                    backward=True,
                    shares=shares,
                    predicts=self.predicts,
                )
        self._pending.num_parts += 1
        if not experience.num_samples and self.groups.pp.rank() == self.groups.pp.size() - 1:
            # Other replicas have metrics, whose names and number this one needs to take part in reducing them.
            nothing = loss_function(experience, *self.objective.of_nothing(experience))
            self._pending.outputs.append(with_loss(nothing, torch.zeros(())) if self.predicts else nothing)

    def _drawing(self, part: int) -> AbstractContextManager[None]:
        """Around a part of a mini-batch, in which adapters draw what they drop: equal on ranks with equal tokens."""
        adapters, groups = self.model.adapters, self.groups
        if adapters is None:
            return nullcontext()
        return adapters.drawing(self.num_updates, part, groups.dp_cp.rank(), groups.pp.rank())

    def step(self) -> dict[str, float]:
        metrics = self._step()
        self.gather.finish()
        return metrics

    def _step(self) -> dict[str, float]:
        """As `step`; the new weights may still be on their way."""
        if self._pending is None:
            raise RuntimeError("step() needs accumulate() before it, on every rank; a share may be empty")
        pending, self._pending = self._pending, None
        self.reduction.begin_rest()
        try:
            return self._apply(pending)
        finally:
            self.reduction.finish()

    def _apply(self, pending: Pending) -> dict[str, float]:
        metrics = self._reduce(pending)
        update = self.num_updates + 1
        self.skipped.require_samples(metrics.pop(NUM_SAMPLES), update, self.groups.dp.size())
        divisor = metrics.pop(DIVISOR)
        loads = self.routers.take(divisor, self.model.device) if self.routers else None
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        is_skipped, grad_norm = self.skipped.is_to_skip("loss", metrics["loss"], update), math.nan
        overflowed = False
        if not is_skipped:
            self.late.settle()
            grad_norm, overflowed = self._update(divisor, rate) if divisor else (0.0, False)
            is_skipped = not math.isfinite(grad_norm)
            if self.routers and loads and divisor and not is_skipped:
                self.routers.update_biases(loads)
        self.num_updates += 1
        if not overflowed:
            self.skipped.count(is_skipped=is_skipped)
        return {
            **metrics,
            **(loads.metrics if loads else {}),
            "grad_norm": grad_norm,
            "lr": rate,
            SKIPPED: float(is_skipped),
            **self.loss_scale.metrics(overflowed=overflowed),
        }

    def save_state(self) -> Contents:
        if self._pending is not None:
            raise RuntimeError("gradients wait for their optimizer step; a training state is saved before or after it")
        scale = self.loss_scale.state()
        return save_state(self.model, self.optimizer, self.parts, self.num_updates, scale, self._copies, self.late)

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """Go on from what `save_state` left on all ranks. Before the first step; raises as state.load_state."""
        counts = load_state(self.model, self.optimizer, files, self.role)
        self.num_updates = counts.num_updates
        self.loss_scale.load(counts.loss_scale)

    def _update(self, divisor: float, rate: float) -> tuple[float, bool]:
        """Divide, clip and apply the gradients unless their norm is not finite; that, and whether it is the loss
        scale's doing. Collective over: the role's ranks."""
        finalize_model_grads(self.chunks, None, pg_collection=self.groups)
        self.model.sum_gradients_of_copies()
        if self.model.adapters:
            self.model.adapters.sum_gradients_of_experts()
        self.gather.finish()
        for chunk in self.chunks:
            chunk.scale_gradients(1 / divisor)
        can_fall = self.loss_scale.can_fall()
        if self.optimizer.prepare_grads() and can_fall:
            return math.inf, True
        grad_norm = float(self.optimizer.clip_grad_norm(self.settings.optimizer.clip_grad or math.inf))
        if self.skipped.is_to_skip("gradient norm", grad_norm, self.num_updates + 1):
            return grad_norm, False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step_with_ready_grads()
        self.gather.begin()
        return grad_norm, False

    def _reduce(self, pending: Pending) -> dict[str, float]:
        """The mini-batch's metrics with NUM_SAMPLES and DIVISOR, on every rank of the role."""
        metrics: dict[str, float] = {}
        if pending.outputs:  # on the last pipeline stage
            metrics = pending.reduced(self.groups.dp, self.model.device)
        last = self.groups.pp.size() - 1
        reduced: dict[str, float] = broadcast_json(metrics, self.groups.pp, source=last, device=self.model.device)
        return reduced


class MegatronAdaptedModel(TrainableModel):
    """As training.backend.AdaptedModel describes it: of `model` its adapters alone are trained."""

    def __init__(
        self,
        model: LanguageModel,
        adapters: Adapters,
        settings: schema.Trained,
        *,
        total_updates: int,
        max_skipped: int = 0,
        role: str = "actor",
    ) -> None:
        """Collective over: the role's ranks."""
        super().__init__(model, settings, total_updates=total_updates, max_skipped=max_skipped, role=role)
        self.published = MadeWeights(self.parameters, adapters.merged)
        self.served = MadeWeights(self.served, adapters.merged)
        self.base = BaseModel(model)
        self.adapters_layout, self.adapters = adapters.layout, adapters.parameters


# Megatron as a training.backend.TrainingBackend.


def layout(site: ModelSite) -> Layout:
    return layout_of_model(site.architecture, site.grid, model=site.config.model, device=site.world.device)


def adapters_layout(site: ModelSite) -> Layout:
    lora = site.config.lora_of(site.role)
    assert lora is not None, "of a role that learns adapters"
    return adapters_layout_of_model(
        site.architecture, site.grid, lora, model=site.config.model, device=site.world.device
    )


def frozen_model(site: ModelSite) -> EvaluableModel:
    return EvaluableModel(_language_model(site, with_weights=True).eval())


def trained_model(
    site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
) -> TrainableModel:
    lora = site.config.lora_of(site.role)
    model = _language_model(site, with_weights=state is None or lora is not None)
    make: Callable[..., TrainableModel] = partial(TrainableModel, model)
    if lora:
        adapters = add_adapters(model, lora, site.config.seed)
        if state is None:
            begin_adapters(adapters.layout, site.world.rank, adapters.parameters, lora, site.config.seed)
        make = partial(MegatronAdaptedModel, model, adapters)
    trained = make(
        settings, total_updates=total_updates, max_skipped=site.config.on_divergence.max_skipped, role=site.role
    )
    if state is not None:
        trained.load_state(state)
    return trained


def _language_model(site: ModelSite, *, with_weights: bool) -> LanguageModel:
    model = build_model(
        site.architecture,
        site.grid,
        site.groups,
        model=site.config.model_of(site.role),
        parallel=site.config.parallel_of(site.role)[0],
        device=site.world.device,
    )
    model.on_micro_batch = site.on_micro_batch
    if with_weights:
        site.load_weights(model.layout, local_parameters(model))
    return model
