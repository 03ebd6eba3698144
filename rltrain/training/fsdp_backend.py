"""FSDP2 as a training backend: evaluation, training and state of a sharded model."""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.config.schema import Trained
from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart, WholePartOnHost
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout
from rltrain.tasks.roles import trained_roles
from rltrain.training.adapters import MadeWeights, begin_adapters
from rltrain.training.backend import SKIPPED, ModelSite
from rltrain.training.fake_quantization import rounded_weights
from rltrain.training.fsdp_model import ShardedModel, layout_of_model, local_shard
from rltrain.training.packing import MicroBatch, pack, padding_alone
from rltrain.training.shards import replica_of
from rltrain.training.trainable import (
    DIVISOR,
    NUM_SAMPLES,
    Evaluable,
    LateCopies,
    LateTensors,
    Outputs,
    Pending,
    SkippedSteps,
    Trainable,
    learning_rate,
)

# Micro-batches through a sharded model.


def make_micro_batches(model: ShardedModel, experience: Experience, max_tokens: int) -> list[MicroBatch]:
    """`experience` in micro-batches of at most `max_tokens` for each rank of context parallelism, and others of padding
    alone: all ranks have as many, as each gathers what the others compute with. Collective over: the role's ranks."""
    share, batches = model.share, list[MicroBatch]()
    if experience.num_samples:
        batches = pack(experience, max_tokens * share.size, device=model.device, share=share)
    count = torch.tensor([len(batches)], device=model.device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.pg_collection.all)
    rows = share.multiple // share.size
    padding = padding_alone(experience, rows, model.device)
    return batches + [replace(padding, segments=(share.multiple,))] * (int(count) - len(batches))


def run(model: ShardedModel, micro_batches: Sequence[MicroBatch], outputs: Outputs, *, backward: bool) -> list[Any]:
    """Forward (and backward) over the micro-batches; what `outputs` kept of each that has samples. Losses are summed,
    and gradients over all ranks. Collective over: the role's ranks."""
    kept = []
    for batch in micro_batches:
        model.on_micro_batch(batch.lengths, backward)
        found = model.outputs(batch)
        if batch.num_tokens:
            loss, of_batch = outputs(batch, found[: batch.num_rows])
            kept.append(of_batch)
        else:
            loss = found[:0].sum()
        if backward:
            loss.backward()
    return kept


# A sharded model, evaluated.


class ShardedEvaluableModel(Evaluable):
    """As training.backend.Model describes it. Where that is collective over a replica it is over the role's ranks."""

    model: ShardedModel

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model, model.layout, model.parameters, model.device)
        self.parts = {"weights": MemoryPart(self._weights)}

    def _weights(self) -> list[Tensor]:
        held, adapters = [*self.parameters.values()], self.model.adapters
        return [*held, *self.model.learned.values(), *adapters.whole_a.values()] if adapters else held

    def micro_batches(self, experience: Experience, max_tokens: int) -> list[MicroBatch]:
        return make_micro_batches(self.model, experience, max_tokens)

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        kept = run(self.model, micro_batches, outputs, backward=False)
        self.model.give_up_gathered()
        return kept

    def share_results(self, results: Sequence[Tensor]) -> None:
        """Every rank of a replica has them."""


class ShardedBaseModel(ShardedEvaluableModel):
    """A model whose adapters are off while it is evaluated: in the same memory, what it was before they learned."""

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        adapters = self.model.adapters
        assert adapters is not None, "a model without adapters is its own base"
        with adapters.off():
            return super().forward(micro_batches, outputs)


# AdamW over the shards of a model, with the norm of its whole gradient.

MOMENTS = ("exp_avg", "exp_avg_sq")
NORM_EPSILON = 1e-6
"""Megatron's, in the factor that clips."""


class ShardedAdam:
    """Works on this rank's shards, which are fp32, as tensors of their own: what a step does to an element depends on
    no other."""

    def __init__(self, model: ShardedModel, settings: schema.Optimizer) -> None:
        self.model, self.settings = model, settings
        self.named = model.named_learned()
        shards = {name: torch.nn.Parameter(shard) for name, shard in model.learned.items()}
        self.shards: dict[str, torch.nn.Parameter] = shards
        matrices = [shard for name, shard in shards.items() if self.named[name].dim() > 1]
        vectors = [shard for name, shard in shards.items() if self.named[name].dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.num_steps = 0
        """That changed weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Of shards that have any, by name."""
        held = ((name, self.named[name].grad) for name in self.shards)
        return {name: local_shard(gradient) for name, gradient in held if gradient is not None}

    def forget_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        if found := [*self.gradients().values()]:
            torch._foreach_mul_(found, factor)

    def gradient_norm(self) -> float:
        """Of all shards together. Collective over: the ranks that share one copy of the model."""
        found = [*self.gradients().values()]
        squares = torch.zeros((), dtype=torch.float32, device=self.model.device)
        if found:
            squares = torch.stack(torch._foreach_norm(found)).float().square().sum().to(self.model.device)
        dist.all_reduce(squares, group=self.model.pg_collection.shard)
        return float(squares.sqrt())

    def step(self, rate: float, norm: float) -> None:
        """At learning rate `rate`, with gradients clipped whose norm is `norm`."""
        limit = self.settings.clip_grad
        if limit and limit / (norm + NORM_EPSILON) < 1:
            self.scale_gradients(limit / (norm + NORM_EPSILON))
        gradients = self.gradients()
        for name, shard in self.shards.items():
            shard.grad = gradients.get(name)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.num_steps += 1

    def moments(self, name: str) -> dict[str, Tensor]:
        """Of a shard; none before the first step."""
        state = self.adam.state.get(self.shards[name], {})
        return {moment: state[moment] for moment in MOMENTS if moment in state}

    def states(self) -> Iterator[Tensor]:
        """All tensors that it keeps."""
        for state in self.adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def make_states(self, num_steps: int) -> None:
        """Zero moments, counted as after `num_steps`."""
        self.num_steps = num_steps
        for shard in self.shards.values():
            state = {moment: torch.zeros_like(shard) for moment in MOMENTS}
            step = torch.tensor(float(num_steps), device=shard.device)
            self.adam.state[shard] = {"step": step, **state}


# The training state of a sharded model, saved and loaded through layouts, in the terms of every backend.


def save_state(
    model: ShardedModel,
    optimizer: ShardedAdam,
    parts: Mapping[str, MemoryPart],
    num_updates: int,
    copies: MutableMapping[str, Tensor],
    late: LateCopies,
) -> Contents:
    """This rank's shards and what the optimizer keeps of them, read where they lie: on the device or on the host. Of
    ranks with equal shards the first one saves.

    `parts` are the model's. `copies` is empty at the first save and given again at the next, which writes over the
    tensors of the one before. What they are given is left to `late`. RuntimeError where a part was dropped. Not
    collective.
    """
    layout, rank = model.learned_layout, dist.get_rank()
    mine = layout.on(rank)
    names, pieces = [name for name, _ in mine.parameters], mine.pieces
    if replica_of(layout, rank)[0]:
        pieces, names = pieces[:0], []
    flats: dict[str, Tensor] = {}

    def copy(kind: str, name: str, part: str, values: Tensor) -> None:
        flat = flat_name(kind, name)
        flats[flat] = late.add(parts[part], values, 0, values.numel(), copies.get(flat))

    late.begin()
    for name in names:
        copy(MASTER, name, "weights", optimizer.shards[name])
        for moment, values in optimizer.moments(name).items():
            copy(moment, name, "optimizer", values)
    copies.update(flats)
    saved = contents(layout.tensors, names, pieces, flats, Counts(num_updates, optimizer.num_steps))
    return Contents(LateTensors(saved.tensors, late), saved.metadata)


def load_state(model: ShardedModel, optimizer: ShardedAdam, files: Sequence[AnyFile], role: str) -> Counts:
    """Take over a training state from the files of all ranks that saved it, whatever their backend and layout; its
    counts.

    Of a model that has made no optimizer step and is on the device. CheckpointError where a file is missing or damaged,
    where they do not belong together or to a model of these tensors or to another optimizer, and where they lack a part
    of one. Not collective.
    """
    layout = model.learned_layout
    saved = SavedState(files, layout.tensors)
    saved.require_optimizer(Counts.optimizer, role)
    kinds = {MASTER: {name: shard.detach() for name, shard in optimizer.shards.items()}}
    if saved.counts.optimizer_steps:
        optimizer.make_states(saved.counts.optimizer_steps)
        kinds |= {moment: {name: optimizer.moments(name)[moment] for name in optimizer.shards} for moment in MOMENTS}
    mine = layout.on(dist.get_rank())
    saved.read(
        [
            Destination(kind, mine.pieces, [tensors[name].view(-1) for name, _ in mine.parameters])
            for kind, tensors in kinds.items()
        ]
    )
    return saved.counts


# A sharded model together with its gradients and optimizer.


class ShardedTrainableModel(ShardedEvaluableModel, Trainable):
    """As training.backend.TrainedModel describes it, around a model whose weights are loaded, unless `load_state`
    follows. `role` is for messages. Gradients are reduced to shards after every micro-batch."""

    def __init__(
        self, model: ShardedModel, settings: schema.Trained, *, total_updates: int, max_skipped: int, role: str
    ) -> None:
        super().__init__(model)
        self.settings, self.total_updates = settings, total_updates
        self.num_updates = 0
        self.role, self.skipped = role, SkippedSteps(role, max_skipped)
        self.optimizer = ShardedAdam(model, settings.optimizer)
        self.published: Mapping[str, Tensor] = self.parameters
        self.parts = {**self.parts, **self._training_parts()}
        self.served = rounded_weights(self.published, model.fake_quantization, model.dtype)
        self.copy_late()
        self._copies: dict[str, Tensor] = {}
        self._pending: Pending | None = None

    def _training_parts(self) -> dict[str, MemoryPart]:
        states, gradients = self.optimizer.states, self.optimizer.gradients
        if not self.model.on_host:
            return {
                "master_weights": MemoryPart(tuple),
                "optimizer": MemoryPart(states),
                "gradients": MemoryPart(lambda: gradients().values(), forget=self.optimizer.forget_gradients),
            }
        self.published = MadeWeights(self.parameters, lambda _, weight: weight.to(self.device, non_blocking=True))
        return {
            "weights": WholePartOnHost(self.parameters.values),
            "master_weights": MemoryPart(tuple),
            "optimizer": WholePartOnHost(states),
            "gradients": WholePartOnHost(lambda: gradients().values()),
        }

    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        metrics = []
        for experience in mini_batches:
            self.accumulate(experience, loss_function, temperature=temperature)
            metrics.append(self.step())
        return metrics

    def accumulate(self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0) -> None:
        """Collective over: the role's ranks."""
        if self._pending is None:
            self.optimizer.forget_gradients()
            self._pending = Pending()
        self._pending.count(experience)
        loss = self.loss_of(loss_function, temperature)
        micro_batches = make_micro_batches(self.model, experience, self.settings.micro_batch_tokens)
        with self._drawing(self._pending.num_parts):
            self._pending.outputs += run(self.model, micro_batches, loss, backward=True)
        self._pending.num_parts += 1
        if not experience.num_samples:
            # Other replicas have metrics, whose names and number this one needs to take part in reducing them.
            self._pending.outputs.append(loss_function(experience, *self.objective.of_nothing(experience)))

    def _drawing(self, part: int) -> AbstractContextManager[None]:
        """Around a part of a mini-batch, in which adapters may draw what they drop."""
        adapters = self.model.adapters
        return adapters.drawing(self.num_updates, part, dist.get_rank()) if adapters else nullcontext()

    def step(self) -> dict[str, float]:
        if self._pending is None:
            raise RuntimeError("step() needs accumulate() before it, on every rank; a share may be empty")
        pending, self._pending = self._pending, None
        groups, update = self.model.pg_collection, self.num_updates + 1
        metrics = pending.reduced(groups.dp, self.device)
        self.skipped.require_samples(metrics.pop(NUM_SAMPLES), update, dist.get_world_size(groups.dp))
        divisor = metrics.pop(DIVISOR)
        rate = learning_rate(self.settings.optimizer, self.num_updates, self.total_updates)
        is_skipped, norm = self.skipped.is_to_skip("loss", metrics["loss"], update), math.nan
        if not is_skipped:
            self.late.settle()
            norm = self._update(divisor, rate) if divisor else 0.0
            is_skipped = not math.isfinite(norm)
        self.optimizer.forget_gradients()
        self.num_updates += 1
        self.skipped.count(is_skipped=is_skipped)
        return {**metrics, "grad_norm": norm, "lr": rate, SKIPPED: float(is_skipped)}

    def save_state(self) -> Contents:
        if self._pending is not None:
            raise RuntimeError("gradients wait for their optimizer step; a training state is saved before or after it")
        return save_state(self.model, self.optimizer, self.parts, self.num_updates, self._copies, self.late)

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """Go on from what `save_state` left on all ranks. Before the first step; raises as state.load_state."""
        self.num_updates = load_state(self.model, self.optimizer, files, self.role).num_updates

    def _update(self, divisor: float, rate: float) -> float:
        """Divide, clip and apply the gradients unless their norm, which is returned, is not finite. Collective over:
        the role's ranks."""
        self.optimizer.scale_gradients(1 / divisor)
        norm = self.optimizer.gradient_norm()
        if not self.skipped.is_to_skip("gradient norm", norm, self.num_updates + 1):
            self.optimizer.step(rate, norm)
        return norm


class ShardedAdaptedModel(ShardedTrainableModel):
    """As training.backend.AdaptedModel describes it: of `model` its adapters alone are trained."""

    def __init__(
        self, model: ShardedModel, settings: schema.Trained, *, total_updates: int, max_skipped: int, role: str
    ) -> None:
        """Collective over: the role's ranks."""
        super().__init__(model, settings, total_updates=total_updates, max_skipped=max_skipped, role=role)
        assert model.adapters is not None, "a model without adapters is a TrainableModel"
        self.adapters_layout, self.adapters = model.learned_layout, model.learned
        merged = partial(model.adapters.merged, self.adapters)
        self.published = MadeWeights(self.parameters, merged)
        self.served = MadeWeights(rounded_weights(self.parameters, model.fake_quantization, model.dtype), merged)
        self.base = ShardedBaseModel(model)
        self._gather()

    def load_state(self, files: Sequence[AnyFile]) -> None:
        """As TrainableModel's. Collective over: the role's ranks."""
        super().load_state(files)
        self._gather()

    def _update(self, divisor: float, rate: float) -> float:
        norm = super()._update(divisor, rate)
        self._gather()
        return norm

    def _gather(self) -> None:
        assert self.model.adapters is not None
        self.model.adapters.gather(self.model.named_learned())


# FSDP2 as a training.backend.TrainingBackend.


def layout(site: ModelSite) -> Layout:
    trains = site.role in trained_roles() and site.config.lora_of(site.role) is None
    return layout_of_model(site.architecture, site.grid, dtype=site.config.model.dtype, trains=trains)


def adapters_layout(site: ModelSite) -> Layout:
    lora = site.config.lora_of(site.role)
    assert lora is not None, "of a role that learns adapters"
    return fsdp_layout(site.architecture.adapted(lora.rank, lora.targets), site.grid)


def frozen_model(site: ModelSite) -> ShardedEvaluableModel:
    return ShardedEvaluableModel(_sharded_model(site, trains=False, with_weights=True))


def trained_model(
    site: ModelSite, settings: Trained, *, total_updates: int, state: Sequence[AnyFile] | None = None
) -> ShardedTrainableModel:
    lora = site.config.lora_of(site.role)
    model = _sharded_model(site, trains=lora is None, with_weights=state is None or lora is not None, lora=lora)
    if lora and state is None:
        begin_adapters(model.learned_layout, site.world.rank, model.learned, lora, site.config.seed)
    trained = (ShardedAdaptedModel if lora else ShardedTrainableModel)(
        model,
        settings,
        total_updates=total_updates,
        max_skipped=site.config.on_divergence.max_skipped,
        role=site.role,
    )
    if state is not None:
        trained.load_state(state)
    return trained


def _sharded_model(site: ModelSite, *, trains: bool, with_weights: bool, lora: Lora | None = None) -> ShardedModel:
    model = ShardedModel(
        site.architecture,
        site.grid,
        site.groups,
        folder=Path(site.checkpoint or site.config.checkpoint_of(site.role)[0]),
        model=site.config.model_of(site.role),
        fsdp=site.config.fsdp_of(site.role),
        device=site.world.device,
        trains=trains,
        on_host=trains and site.config.keeps_shards_on_host(site.role),
        lora=lora,
        seed=site.config.seed,
    )
    model.on_micro_batch = site.on_micro_batch
    if with_weights:
        site.load_weights(model.layout, model.parameters)
    return model
