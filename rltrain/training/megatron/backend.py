"""Megatron as a training backend: a model with gradients, optimizer, memory and state."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from rltrain.algorithms.losses import LossFunction, LossOutput, sample_shares
from rltrain.checkpoint.saved_state import Counts
from rltrain.config.models import Lora
from rltrain.data.experience import Experience
from rltrain.models.experts import is_expert
from rltrain.models.table import Array
from rltrain.offload.memory_parts import MemoryPart, PartOnHost
from rltrain.reshard.layout import Layout
from rltrain.training.backend import ModelSite, TrainingBackend
from rltrain.training.megatron.experts import Loads, Routers
from rltrain.training.megatron.forward import EvaluableModel, run_schedule
from rltrain.training.megatron.model import (
    ROUTER_BIAS,
    LanguageModel,
    adapters_layout_of_model,
    add_adapters,
    build_model,
    layout_of_model,
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
from rltrain.training.optimizers import ADAM_STATES
from rltrain.training.packing import MicroBatch
from rltrain.training.shards import answered_for, sharing_groups, within
from rltrain.training.trainable import DIVISOR, MOMENTS, Optimized, Pending, Range, TrainedModel, limits

# What a model's optimizer keeps of every parameter, whichever class of optimizer it is.


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


class TrainableModel(EvaluableModel, TrainedModel):
    def make_optimizer(self) -> Mapping[str, MemoryPart]:
        model, settings, groups = self.model, self.settings, self.groups
        self.predicts = model.architecture.predicts
        parallel = data_parallel_config(settings, groups.dp_cp.size(), model.device)
        self.chunks = [data_parallel(model.config, parallel, chunk, groups) for chunk in model.chunks]
        self.routers = Routers(model, model.architecture, model.moe, groups) if model.architecture.moe else None
        self._loads: Loads | None = None
        self.reduction, self.gather = GradientReduction(self.chunks), ParameterGather(self.chunks)
        self.optimizer = build_optimizer(self.chunks, settings.optimizer, groups)
        if is_replaced(settings.optimizer):
            replace_steps(model, self.optimizer, settings.optimizer)
        self.loss_scale = MegatronLossScale(self.optimizer, model.config)
        # Else Megatron's schedules would reduce the gradients after every part of a mini-batch.
        model.config.finalize_model_grads_func = None
        return training_parts(model, self.chunks, self.optimizer)

    def without_adapters(self) -> EvaluableModel:
        return EvaluableModel(self.model, is_base=True)

    def forget_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> list[LossOutput]:
        """Of a whole mini-batch reducing begins meanwhile."""
        if not micro_batches:
            return []
        if is_whole:
            self.reduction.expect(len(micro_batches))
        return run_schedule(
            self.model,
            micro_batches,
            self.loss_of(loss_function, temperature),
            chunks=self.chunks,
            backward=True,
            shares=partial(sample_shares, loss_function),
            predicts=self.predicts,
        )

    @property
    def ends_here(self) -> bool:
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    def output_of_nothing(self, experience: Experience, loss_function: LossFunction) -> LossOutput:
        nothing = super().output_of_nothing(experience, loss_function)
        return with_loss(nothing, torch.zeros(())) if self.predicts else nothing

    def place_in_replicas(self) -> tuple[int, ...]:
        return self.groups.dp_cp.rank(), self.groups.pp.rank()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        self.reduction.begin_rest()
        try:
            yield
        finally:
            self.reduction.finish()

    def reduced(self, pending: Pending) -> dict[str, float]:
        metrics = super().reduced(pending) if pending.outputs else {}  # on the last pipeline stage
        metrics = _from_last_stage(metrics, self.groups.pp, self.device)
        if self.routers:
            self._loads = self.routers.take(metrics[DIVISOR], self.device)
            metrics |= self._loads.metrics
        return metrics

    def update(self, divisor: float, rate: float) -> tuple[float, bool]:
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
        if self.routers and self._loads:
            self.routers.update_biases(self._loads)
        return grad_norm, False

    def scale_metrics(self, *, overflowed: bool) -> dict[str, float]:
        return self.loss_scale.metrics(overflowed=overflowed)

    def finish_steps(self) -> None:
        self.gather.finish()

    def optimized(self) -> dict[str, Optimized]:
        names = {id(parameter): name for name, parameter in self.model.learned.items()}
        found: dict[str, Optimized] = {}
        for member in members(self.optimizer):
            is_shard, own = isinstance(member, DistributedOptimizer), stepping(member)
            for parameter, key in masters(member):
                part = "weights" if parameter.dtype == torch.float32 else "master_weights"
                state = member.state.get(key, {})
                moments = {moment: state[moment] for moment in MOMENTS if moment in state}
                master = own.master(key) if own else key
                found[names[id(parameter)]] = Optimized(master, first_of(member, parameter), is_shard, part, moments)
        return found

    def kept(self) -> dict[str, Optimized]:
        """With the routers' biases, which follow the experts' loads."""
        biases = {name: bias for name, bias in self.model.learned.items() if name.endswith(ROUTER_BIAS)}
        kept = {name: Optimized(bias, 0, is_shard=False, part="weights", moments={}) for name, bias in biases.items()}
        return kept | self.optimized()

    def answered_for(self, kept: Mapping[str, Optimized]) -> tuple[list[str], Array, Mapping[str, Range]]:
        """Shards by those that have them; of what several ranks have whole each saves a part."""
        layout, rank = self.model.learned_layout, dist.get_rank()
        names = [name for name, _ in layout.on(rank).parameters]
        shares, tables = dict[str, Range](), []
        for groups, of_experts in zip(sharing_groups(self.model.grid), (False, True), strict=True):
            mine = next(ranks for ranks in groups if rank in ranks)
            of_kind = {name: one for name, one in kept.items() if is_expert(name) == of_experts}
            cut = {name: _share(one, mine.index(rank), len(mine)) for name, one in of_kind.items()}
            tables.append(within(answered_for(layout, rank, groups), *limits(names, cut)))
            shares |= cut
        return names, np.concatenate(tables), shares

    def counts(self) -> Counts:
        steps = step_count(self.optimizer)
        if isinstance(steps, Tensor):
            steps = int(self.parts["optimizer"].read(steps))
        return Counts(self.num_updates, steps, self.loss_scale.state(), optimizer_name(self.optimizer))

    def make_states(self, num_steps: int) -> None:
        make_states(self.optimizer, num_steps)

    def go_on(self, counts: Counts) -> None:
        self.loss_scale.load(counts.loss_scale)


def _share(one: Optimized, index: int, replicas: int) -> Range:
    """What rank number `index` of as many that share a parameter saves of it."""
    count = one.master.numel()
    return one.range if one.is_shard else (count * index // replicas, count * (index + 1) // replicas)


def _from_last_stage(metrics: dict[str, float], pipeline: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """The last pipeline stage's metrics, on every stage. Collective over: the pipeline-parallel group."""
    if pipeline.size() == 1:
        return metrics
    source = pipeline.size() - 1
    names = torch.tensor(list(json.dumps(list(metrics)).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(names)], device=device)
    dist.broadcast(size, group=pipeline, group_src=source)
    if pipeline.rank() != source:
        names = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(names, group=pipeline, group_src=source)
    keys = json.loads(bytes(names.tolist()))
    values = torch.tensor([metrics.get(key, 0.0) for key in keys], dtype=torch.float64, device=device)
    dist.broadcast(values, group=pipeline, group_src=source)
    return dict(zip(keys, values.tolist(), strict=True))


class MegatronBackend(TrainingBackend):
    evaluated, trained = EvaluableModel, TrainableModel

    def layout(self, site: ModelSite) -> Layout:
        return layout_of_model(site.architecture, site.grid, model=site.config.model, device=site.world.device)

    def layout_of_adapters(self, site: ModelSite, lora: Lora) -> Layout:
        return adapters_layout_of_model(
            site.architecture, site.grid, lora, model=site.config.model, device=site.world.device
        )

    def build(self, site: ModelSite, lora: Lora | None, *, trains: bool) -> LanguageModel:
        model = build_model(
            site.architecture,
            site.grid,
            site.groups,
            model=site.config.model_of(site.role),
            parallel=site.config.parallel_of(site.role)[0],
            device=site.world.device,
        )
        if lora:
            add_adapters(model, lora, site.config.seed)
        return model if trains else model.eval()
