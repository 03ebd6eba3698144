"""The FSDP2 training backend: evaluation, training and state of a sharded model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput
from rltrain.checkpoint.saved_state import Counts
from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.models.table import Array
from rltrain.offload.memory_parts import MemoryPart, WholePartOnHost
from rltrain.reshard.fsdp_layout import fsdp_layout
from rltrain.reshard.layout import Layout
from rltrain.tasks.roles import trained_roles
from rltrain.training.adapters import MadeWeights
from rltrain.training.backend import ModelSite, TrainingBackend
from rltrain.training.fsdp_model import ShardedModel, layout_of_model, local_shard
from rltrain.training.fsdp_vision import shown_in
from rltrain.training.optimizers import ADAM_STATES
from rltrain.training.packing import MicroBatch
from rltrain.training.shards import Range, replica_of
from rltrain.training.trainable import Optimized, Outputs, RoleModel, TrainedModel

# Evaluation of a sharded model.


def run(model: ShardedModel, micro_batches: Sequence[MicroBatch], outputs: Outputs, *, backward: bool) -> list[Any]:
    """Runs forward, and backward if asked, over the micro-batches. Returns the kept results of those with samples.

    Losses are summed, and gradients are summed over all ranks. Collective over: the role's ranks.
    """
    kept = []
    images = model.tower_pass(micro_batches, trains=backward)
    for number, batch in enumerate(micro_batches):
        model.on_micro_batch(*batch.computed, backward)
        found = model.outputs(batch, shown_in(images, number, batch, model.share))
        if batch.num_tokens:
            loss, of_batch = outputs(batch, found[: batch.num_rows])
            kept.append(of_batch)
        else:
            loss = _of_nothing(model, found[:0])
        if backward:
            loss.backward()
    if images is not None:
        images.backward()
    return kept


def _of_nothing(model: ShardedModel, outputs: Tensor) -> Tensor:
    """Returns the loss of a micro-batch without samples. As in every pass, all parameters get a gradient."""
    if model.architecture.head == "vocabulary":
        outputs = model.logits_of(outputs)[:, :]
    return outputs.sum()


class ShardedEvaluableModel(RoleModel):
    """A sharded model for evaluation. It is collective over all the role's ranks, and each of them has all results."""

    model: ShardedModel

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        kept = run(self.model, micro_batches, outputs, backward=False)
        self.model.give_up_gathered()
        return kept


# AdamW over the shards of a model, clipped by the norm of the whole gradient.

NORM_EPSILON = 1e-6
"""Megatron's constant in the clipping factor."""


class ShardedAdam:
    """AdamW on this rank's fp32 shards. A step is elementwise, so shards are independent of each other."""

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
        """Number of steps with changed weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of shards by name, for shards with a gradient."""
        held = ((name, self.named[name].grad) for name in self.shards)
        return {name: local_shard(gradient) for name, gradient in held if gradient is not None}

    def forget_gradients(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        if found := [*self.gradients().values()]:
            torch._foreach_mul_(found, factor)

    def gradient_norm(self) -> float:
        """Returns the norm over all shards. Collective over: the ranks of one copy of the model."""
        found = [*self.gradients().values()]
        squares = torch.zeros((), dtype=torch.float32, device=self.model.device)
        if found:
            squares = torch.stack(torch._foreach_norm(found)).float().square().sum().to(self.model.device)
        dist.all_reduce(squares, group=self.model.pg_collection.shard)
        return float(squares.sqrt())

    def step(self, rate: float, norm: float) -> None:
        """Makes a step at learning rate `rate`. Gradients are clipped by their `norm`."""
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
        """Returns the moments of a shard. There are none before the first step."""
        state = self.adam.state.get(self.shards[name], {})
        return {moment: state[moment] for moment in ADAM_STATES if moment in state}

    def states(self) -> Iterator[Tensor]:
        """Yields all tensors of the optimizer's state."""
        for state in self.adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def make_states(self, num_steps: int) -> None:
        """Makes zero moments with a step count of `num_steps`."""
        self.num_steps = num_steps
        for shard in self.shards.values():
            state = {moment: torch.zeros_like(shard) for moment in ADAM_STATES}
            step = torch.tensor(float(num_steps), device=shard.device)
            self.adam.state[shard] = {"step": step, **state}


# A sharded model with gradients and an optimizer.


class ShardedTrainableModel(ShardedEvaluableModel, TrainedModel):
    """A sharded model for training. Gradients are reduced to shards after every micro-batch."""

    def make_optimizer(self) -> Mapping[str, MemoryPart]:
        self.optimizer = optimizer = ShardedAdam(self.model, self.settings.optimizer)
        self._gather_adapters()
        parts = {"master_weights": MemoryPart(tuple)}
        if not self.model.on_host:
            parts["optimizer"] = MemoryPart(optimizer.states)
            gradients = MemoryPart(lambda: optimizer.gradients().values(), forget=optimizer.forget_gradients)
            return {**parts, "gradients": gradients}
        parts["weights"] = WholePartOnHost(self.parameters.values)
        parts["optimizer"] = WholePartOnHost(optimizer.states)
        return {**parts, "gradients": WholePartOnHost(lambda: optimizer.gradients().values())}

    def readable_weights(self) -> Mapping[str, Tensor]:
        if not self.model.on_host:
            return self.parameters
        return MadeWeights(self.parameters, lambda _, weight: weight.to(self.device, non_blocking=True))

    def without_adapters(self) -> ShardedEvaluableModel:
        return ShardedEvaluableModel(self.model, is_base=True)

    def forget_gradients(self) -> None:
        self.optimizer.forget_gradients()

    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> list[LossOutput]:
        return run(self.model, micro_batches, self.loss_of(loss_function, temperature), backward=True)

    def place_in_replicas(self) -> tuple[int, ...]:
        return (dist.get_rank(),)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.optimizer.forget_gradients()

    def update(self, divisor: float, rate: float) -> tuple[float, bool]:
        self.optimizer.scale_gradients(1 / divisor)
        norm = self.optimizer.gradient_norm()
        if not self.skipped.is_to_skip("gradient norm", norm, self.num_updates + 1):
            self.optimizer.step(rate, norm)
        self._gather_adapters()
        return norm, False

    def optimized(self) -> dict[str, Optimized]:
        optimizer = self.optimizer
        return {
            name: Optimized(shard.detach(), 0, is_shard=True, part="weights", moments=optimizer.moments(name))
            for name, shard in optimizer.shards.items()
        }

    def answered_for(self, kept: Mapping[str, Optimized]) -> tuple[list[str], Array, Mapping[str, Range]]:
        """The first rank of those with equal shards saves all of them."""
        layout, rank = self.model.learned_layout, dist.get_rank()
        mine = layout.on(rank)
        if replica_of(layout, rank)[0]:
            return [], mine.pieces[:0], {}
        return [name for name, _ in mine.parameters], mine.pieces, {name: one.range for name, one in kept.items()}

    def counts(self) -> Counts:
        return Counts(self.num_updates, self.optimizer.num_steps)

    def make_states(self, num_steps: int) -> None:
        self.optimizer.make_states(num_steps)

    def go_on(self, counts: Counts) -> None:
        self._gather_adapters()

    def _gather_adapters(self) -> None:
        """Gathers the adapters' A matrices. Collective over: the role's ranks."""
        if self.model.adapters:
            self.model.adapters.gather(self.model.named_learned())


class FsdpBackend(TrainingBackend):
    evaluated, trained = ShardedEvaluableModel, ShardedTrainableModel

    def layout(self, site: ModelSite) -> Layout:
        trains = site.role in trained_roles() and site.config.lora_of(site.role) is None
        return layout_of_model(site.architecture, site.grid, dtype=site.config.model.dtype, trains=trains)

    def layout_of_adapters(self, site: ModelSite, lora: Lora) -> Layout:
        return fsdp_layout(site.architecture.adapted(lora.rank, lora.targets, vision=lora.vision), site.grid)

    def build(self, site: ModelSite, lora: Lora | None, *, trains: bool) -> ShardedModel:
        trains_all = trains and lora is None
        return ShardedModel(
            site.architecture,
            site.grid,
            site.groups,
            folder=Path(site.checkpoint or site.config.checkpoint_of(site.role)[0]),
            model=site.config.model_of(site.role),
            fsdp=site.config.fsdp_of(site.role),
            device=site.world.device,
            trains=trains_all,
            on_host=trains_all and site.config.keeps_shards_on_host(site.role),
            lora=lora,
            seed=site.config.seed,
            sight=site.sight(),
        )
