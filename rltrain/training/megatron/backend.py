"""Megatron as a training backend: micro-batches through its schedules, gradients, optimizer, memory and state."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput, sample_shares
from rltrain.checkpoint.saved_state import Counts
from rltrain.config.models import Lora
from rltrain.data.experience import Experience
from rltrain.models.experts import is_expert
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.models.table import Array
from rltrain.offload.memory_parts import MemoryPart, PartOnHost
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import chunks_of
from rltrain.runtime.group_messages import broadcast_json
from rltrain.runtime.process_groups import plain_group
from rltrain.training.backend import ModelSite, TrainingBackend
from rltrain.training.megatron.experts import Choices, Loads, Routers, routed_samples
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
from rltrain.training.megatron.prediction import Predicted, tell_following, with_loss
from rltrain.training.megatron.versions import data_parallel
from rltrain.training.optimizers import ADAM_STATES
from rltrain.training.packing import MicroBatch, of_all_tokens
from rltrain.training.shards import answered_for, sharing_groups, within
from rltrain.training.trainable import (
    DIVISOR,
    MOMENTS,
    Optimized,
    Outputs,
    Pending,
    Range,
    RoleModel,
    TrainedModel,
    limits,
)

# Messages between the stages of a pipeline: hidden states to the stage behind, their gradients to the one before.


class PairOfStages(P2PCommunicator):
    """Between two interleaved stages, of which each is both the one before and the one behind the other.

    Nothing but their order tells two messages apart that go from one rank to the other in one exchange: NCCL knows no
    tags, and gloo's are not used. Megatron issues what goes to, and comes from, the stage before first, on both ranks;
    so the gradient that one sends there would be taken for the hidden state that the other awaits from there.
    """

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int],
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """As Megatron's, of shapes that are known, and done when it returns: hidden states first, then gradients, on
        either side. Collective over: the pipeline-parallel group."""
        other = self.next_rank
        hidden, gradient = (
            torch.empty(
                tuple(tensor_shape),
                requires_grad=True,
                device=torch.cuda.current_device(),
                dtype=self.config.pipeline_dtype,
            )
            if awaited
            else None
            for awaited in (recv_prev, recv_next)
        )
        messages = [
            dist.P2POp(operation, tensor, other, self.pp_group)
            for operation, tensor in (
                (dist.isend, tensor_send_next),
                (dist.irecv, hidden),
                (dist.isend, tensor_send_prev),
                (dist.irecv, gradient),
            )
            if tensor is not None
        ]
        for request in dist.batch_isend_irecv(messages) if messages else ():
            request.wait()
        return hidden, gradient, None


def stage_messages(group: dist.ProcessGroup, config: ModelParallelConfig) -> P2PCommunicator:
    """What a pipeline over `group` exchanges tensors by."""
    is_pair = group.size() == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1
    return (PairOfStages if is_pair else P2PCommunicator)(group, config)


# Of a micro-batch the experts that are given, cut as its tokens and the layers are, and those that were chosen.


def given_choices(model: LanguageModel, batch: MicroBatch) -> dict[int, Tensor]:
    """`Choices.given` of the layers of this rank, on its device; none where the micro-batch brings none."""
    if not batch.experience.has("routed_experts"):
        return {}
    shape = RoutingShape.of(model.architecture)
    of_rows = batch.rows_of(shape.unpacked(batch.experience.routed_experts))
    if batch.slices is not None:
        of_rows[~_holds_token(model, batch)] = NOT_RECORDED
    padding = shape.unknown(len(batch.padded_tokens) - len(of_rows))
    of_rank = torch.cat([of_rows, padding])
    if model.config.sequence_parallel:
        of_rank = of_rank.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]
    return {layer: of_rank[:, place].to(model.device) for layer, place in _own_layers(model).items()}


def found_choices(model: LanguageModel, batch: MicroBatch, found: Mapping[int, Tensor]) -> Tensor:
    """[tokens, token_bytes] what routers chose, as the field of an Experience, on the device; NOT_RECORDED in layers of
    other pipeline stages. Collective over: the tensor- and context-parallel groups."""
    shape = RoutingShape.of(model.architecture)
    result = shape.unknown(batch.num_tokens).to(model.device)
    for layer, place in _own_layers(model).items():
        of_rows = found[layer].to(shape.experts)
        if model.config.sequence_parallel:
            of_rows = _gathered(of_rows, model)
        result[:, place] = of_all_tokens(batch, of_rows[: batch.num_rows], model.pg_collection.cp)
    return shape.packed(result)


def _holds_token(model: LanguageModel, batch: MicroBatch) -> Tensor:
    """[rows] of this rank's slices: not those of the samples' padding."""
    assert batch.slices is not None
    share = model.share
    of_all = torch.zeros(share.size * batch.num_rows, dtype=torch.bool)
    of_all[batch.slices.row_of_token.cpu()] = True
    return of_all.chunk(share.size)[share.rank]


def _gathered(of_rank: Tensor, model: LanguageModel) -> Tensor:
    """Of all tensor-parallel ranks, whose tokens follow each other."""
    group = model.pg_collection.tp
    whole = of_rank.new_empty(group.size() * len(of_rank), *of_rank.shape[1:])
    dist.all_gather_into_tensor(whole, of_rank, group=group)
    return whole


def _own_layers(model: LanguageModel) -> dict[int, int]:
    """Those of this rank that have experts, and their places among all that do."""
    places = [layer for layer, sparse in enumerate(model.architecture.sparse_layers) if sparse]
    chunks = chunks_of(model.architecture, model.grid)[model.pg_collection.pp.rank()]
    return {layer: places.index(layer) for chunk in chunks for layer in chunk.layers if layer in places}


# Micro-batches through Megatron's schedules, and what comes out of them by token.

PIPELINED = (forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving)


def run_schedule(
    model: LanguageModel,
    micro_batches: Sequence[MicroBatch],
    outputs: Outputs,
    *,
    chunks: Sequence[torch.nn.Module] | None = None,
    backward: bool,
    shares: Callable[[Experience], Tensor] | None = None,
    found: Sequence[dict[int, Tensor]] | None = None,
    predicts: bool = False,
) -> list[Any]:
    """Run forward (and backward) over the micro-batches; what `outputs` kept of each that has samples, on the last
    pipeline stage only.

    `chunks` are the model's, or their data-parallel wrappers. `shares` gives [samples] what each counts for, in losses
    that layers add to the gradients, and in their statistics; None: there is nothing of that. `found` takes, for every
    micro-batch, what routers choose in this rank's layers. With `predicts` the layer that predicts a further token adds
    its loss, of which `outputs` keeps a LossOutput. Losses are summed: nothing is divided by the number of
    micro-batches, and no gradient is reduced. Collective over: this replica, and where replicas hold experts for each
    other all of them.
    """
    groups, config, chunks = model.pg_collection, model.config, list(chunks or model.chunks)

    def step(
        batches: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, batch = next(batches)
        if chunk is chunks[0]:
            model.on_micro_batch(batch.lengths, backward)
        sequences = _described(model, batch, shares, None if found is None else found[number])
        predicted = tell_following(sequences, batch) if predicts else None
        hidden_or_logits = chunk(
            input_ids=batch.padded_tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=sequences,
        )

        return hidden_or_logits, partial(_last_stage, model, batch, outputs, shares, predicted)

    arguments: dict[str, Any] = {
        "forward_step_func": step,
        "data_iterator": [iter(enumerate(micro_batches)) for _ in chunks],
        "model": chunks,
        "num_microbatches": len(micro_batches),
        "seq_length": sum(micro_batches[0].segments),
        "micro_batch_size": 1,
        "forward_only": not backward,
        "pg_collection": groups,
    }
    schedule = forward_backward_no_pipelining
    if groups.pp.size() > 1:
        schedule = PIPELINED[len(chunks) > 1]
        arguments["p2p_communicator"] = stage_messages(plain_group(groups.pp), config)
    kept = schedule(**arguments)
    return [of_batch for of_batch, batch in zip(kept, micro_batches, strict=False) if batch.num_tokens]


def _last_stage(
    model: LanguageModel,
    batch: MicroBatch,
    outputs: Outputs,
    shares: Callable[[Experience], Tensor] | None,
    predicted: Predicted | None,
    logits: Tensor,
) -> tuple[Tensor, Tensor, Any]:
    """Of what the last chunk put out: the loss, Megatron's count of tokens and what is kept."""
    no_tokens = torch.zeros((), dtype=torch.int)
    if not batch.num_tokens:
        nothing = logits[0, :0].sum()
        return nothing if predicted is None else nothing + predicted.made[:0].sum(), no_tokens, None
    loss, kept = outputs(batch, logits[0, : batch.num_rows])
    if predicted is not None:
        assert shares is not None, "in training"
        further = model.prediction_loss(batch, predicted.made, shares(batch.experience))
        loss, kept = loss + model.prediction.coef * further, with_loss(kept, further)
    # Megatron would divide by its count; TrainableModel divides, once all parts of a mini-batch are there.
    return loss, no_tokens, kept


def _described(
    model: LanguageModel,
    batch: MicroBatch,
    shares: Callable[[Experience], Tensor] | None,
    found: dict[int, Tensor] | None,
) -> PackedSeqParams:
    """The packed sequences, and beside them what routers of all layers are to know: layers are computed anew in
    backward, when the next micro-batch is on its way already."""
    sequences = model.sequences(batch.segments)
    if shares is not None and model.architecture.moe:
        vars(sequences)["routed_samples"] = routed_samples(batch, shares(batch.experience))
    given = given_choices(model, batch)
    if given or found is not None:
        vars(sequences)["choices"] = Choices(given, found)
    return sequences


# Megatron's model evaluated by its schedules.


class EvaluableModel(RoleModel):
    model: LanguageModel

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Collective over: this replica."""
        shape = RoutingShape.of(self.model.architecture)
        routed = shape.packed(shape.unknown(experience.num_tokens))

        def forward(micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
            found: list[dict[int, Tensor]] = [{} for _ in micro_batches]
            kept = self.forward(micro_batches, outputs, found)
            for batch, of_layers in zip(micro_batches, found, strict=True):
                routed[batch.token_index] = found_choices(self.model, batch, of_layers).cpu()
            return kept

        return self._evaluate(experience, max_tokens, temperature, forward=forward)[0], routed

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        outputs: Outputs,
        found: Sequence[dict[int, Tensor]] | None = None,
    ) -> list[Any]:
        """`found` as in run_schedule."""
        was_training = self.model.training
        self.model.eval()
        kept = run_schedule(self.model, micro_batches, outputs, backward=False, found=found)
        self.model.train(was_training)
        return kept

    def shared(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        pipeline = self.model.pg_collection.pp
        for result in results if pipeline.size() > 1 else ():
            dist.broadcast(result, group=pipeline, group_src=pipeline.size() - 1)
        return results


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
        metrics = broadcast_json(metrics, self.groups.pp, source=self.groups.pp.size() - 1, device=self.device)
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
