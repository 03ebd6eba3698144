"""The Megatron training backend: schedules over micro-batches, gradients, optimizer, memory parts and saved state."""

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
from rltrain.training.megatron.tower import IMAGES, ROPE_POSITIONS
from rltrain.training.megatron.versions import data_parallel
from rltrain.training.optimizers import ADAM_STATES
from rltrain.training.packing import MicroBatch, of_all_tokens
from rltrain.training.shards import Range, answered_for, limits, sharing_groups, within
from rltrain.training.tower_pass import TowerPass
from rltrain.training.trainable import (
    DIVISOR,
    MOMENTS,
    Optimized,
    Outputs,
    Pending,
    RoleModel,
    TrainedModel,
)

# Messages between pipeline stages: hidden states to the next stage, gradients to the previous one.


class PairOfStages(P2PCommunicator):
    """Messages of a pipeline with two interleaved stages. Each stage is both the previous and the next one of the
    other.

    Messages from one rank to another in one exchange are matched by order alone: NCCL has no tags, and gloo's are not
    used. On both ranks Megatron first issues all messages of the previous stage. So one rank's gradient would be
    received as the other rank's hidden state.
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
        """Exchanges tensors of known shapes: hidden states first, then gradients, on both ranks. Returns when finished.

        Collective over: the pipeline-parallel group.
        """
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
    """Returns the object for messages between the stages of a pipeline over `group`."""
    is_pair = group.size() == 2 and (config.virtual_pipeline_model_parallel_size or 1) > 1
    return (PairOfStages if is_pair else P2PCommunicator)(group, config)


# Routing choices of a micro-batch: given experts, sliced like its tokens and layers, and recorded experts.


def given_choices(model: LanguageModel, batch: MicroBatch) -> dict[int, Tensor]:
    """Returns `Choices.given` of this rank's layers, on its device. It is empty if the micro-batch has no routing."""
    if not batch.experience.has("routed_experts"):
        return {}
    shape = RoutingShape.of(model.architecture)
    of_rows = batch.rows_of(shape.unpacked(batch.experience.routed_experts))
    if batch.slices is not None:
        of_rows[~_holds_token(model, batch)] = NOT_RECORDED
    padding = shape.unknown(len(batch.padded_tokens) - len(of_rows))
    of_rank = _of_rank(model, torch.cat([of_rows, padding]))
    return {layer: of_rank[:, place].to(model.device) for layer, place in _own_layers(model).items()}


def _tokens_of_rows(model: LanguageModel, batch: MicroBatch) -> Tensor | None:
    """Returns `Choices.tokens` of a micro-batch."""
    if batch.tree is None:
        return None
    rows = batch.rows_of_all(model.share)
    counts = rows[rows >= 0].bincount(minlength=len(batch.padded_tokens))
    return _of_rank(model, counts)[:, None].to(model.device)


def _of_rank(model: LanguageModel, of_rows: Tensor) -> Tensor:
    """Selects the rows of this tensor-parallel rank."""
    group = model.pg_collection.tp
    return of_rows.chunk(group.size())[group.rank()] if model.config.sequence_parallel else of_rows


def found_choices(model: LanguageModel, batch: MicroBatch, found: Mapping[int, Tensor]) -> Tensor:
    """Returns the routers' choices as an Experience field, [tokens, token_bytes], on the device.

    Layers of other pipeline stages are NOT_RECORDED. Collective over: the tensor- and context-parallel groups.
    """
    shape = RoutingShape.of(model.architecture)
    result = shape.unknown(batch.num_tokens).to(model.device)
    for layer, place in _own_layers(model).items():
        of_rows = found[layer].to(shape.experts)
        if model.config.sequence_parallel:
            of_rows = _gathered(of_rows, model)
        result[:, place] = of_all_tokens(batch, of_rows[: batch.num_rows], model.pg_collection.cp)
    return shape.packed(result)


def _holds_token(model: LanguageModel, batch: MicroBatch) -> Tensor:
    """Returns a bool mask [rows] of this rank's slices, False for padding."""
    assert batch.slices is not None
    share = model.share
    of_all = torch.zeros(share.size * batch.num_rows, dtype=torch.bool)
    of_all[batch.slices.row_of_token.cpu()] = True
    return of_all.chunk(share.size)[share.rank]


def _gathered(of_rank: Tensor, model: LanguageModel) -> Tensor:
    """Concatenates the rows of all tensor-parallel ranks, in rank order."""
    group = model.pg_collection.tp
    whole = of_rank.new_empty(group.size() * len(of_rank), *of_rank.shape[1:])
    dist.all_gather_into_tensor(whole, of_rank, group=group)
    return whole


def _own_layers(model: LanguageModel) -> dict[int, int]:
    """Returns this rank's layers with experts, each with its index among all layers with experts."""
    places = [layer for layer, sparse in enumerate(model.architecture.sparse_layers) if sparse]
    chunks = chunks_of(model.architecture, model.grid)[model.pg_collection.pp.rank()]
    return {layer: places.index(layer) for chunk in chunks for layer in chunk.layers if layer in places}


# Megatron's schedules over micro-batches, and their results per token.

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
    """Runs forward, and backward if asked, over the micro-batches.

    Returns the results kept by `outputs` for each micro-batch with samples, on the last pipeline stage only.

    - `chunks` are the model's chunks or their data-parallel wrappers.
    - `shares` returns each sample's weight [samples] in layers' own losses and statistics. None: layers add no losses.
    - `found` receives the routers' choices in this rank's layers, for every micro-batch.
    - `predicts` adds the loss of the multi-token prediction layer. `outputs` must then keep a LossOutput.

    Losses are summed without division by the number of micro-batches, and no gradient is reduced. Collective over: this
    replica, or all replicas if they hold experts for each other.
    """
    groups, config, chunks = model.pg_collection, model.config, list(chunks or model.chunks)
    images = model.tower_pass(micro_batches, trains=backward)

    def step(
        batches: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, batch = next(batches)
        if chunk is chunks[0]:
            model.on_micro_batch(*batch.computed, backward)
        sequences = _described(model, batch, shares, None if found is None else found[number])
        _show(images if chunk is chunks[0] else None, number, model, batch, sequences)
        predicted = tell_following(sequences, batch) if predicts else None
        hidden_or_logits = chunk(
            input_ids=batch.padded_tokens[None], position_ids=None, attention_mask=None, packed_seq_params=sequences
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
    if images is not None:
        images.backward()
    return [of_batch for of_batch, batch in zip(kept, micro_batches, strict=False) if batch.num_tokens]


def _last_stage(
    model: LanguageModel,
    batch: MicroBatch,
    outputs: Outputs,
    shares: Callable[[Experience], Tensor] | None,
    predicted: Predicted | None,
    logits: Tensor,
) -> tuple[Tensor, Tensor, Any]:
    """Returns the loss, Megatron's token count and the result to keep, from the outputs of the last chunk."""
    no_tokens = torch.zeros((), dtype=torch.int)
    if not batch.num_tokens:
        nothing = logits[0, :0]
        if model.architecture.head == "vocabulary":
            head = model.logits_of(nothing)
            assert head.weight is not None
            # Every pass gives the weights a gradient, so that all replicas reduce it at the same place of backward.
            nothing = torch.nn.functional.linear(head.states, head.weight)
        nothing = nothing.sum()
        return nothing if predicted is None else nothing + predicted.made[:0].sum(), no_tokens, None
    loss, kept = outputs(batch, logits[0, : batch.num_rows])
    if predicted is not None:
        assert shares is not None, "needed in training"
        further = model.prediction_loss(batch, predicted.made, shares(batch.experience))
        loss, kept = loss + model.prediction.coef * further, with_loss(kept, further)
    # Megatron would divide by its count. TrainableModel divides once, after all parts of a mini-batch.
    return loss, no_tokens, kept


def _described(
    model: LanguageModel,
    batch: MicroBatch,
    shares: Callable[[Experience], Tensor] | None,
    found: dict[int, Tensor] | None,
) -> PackedSeqParams:
    """Returns the packed sequences, with the routers' inputs and the positions around images as attributes.

    They belong to the sequences because layers are recomputed in backward, when the next micro-batch may have started.
    """
    sequences = model.sequences_of(batch)
    if shares is not None and model.architecture.moe:
        vars(sequences)["routed_samples"] = routed_samples(batch, shares(batch.experience), model.share)
    given = given_choices(model, batch)
    if given or found is not None:
        vars(sequences)["choices"] = Choices(given, found, _tokens_of_rows(model, batch))
    if batch.experience.has("rope_positions"):
        of_rows = batch.rows_of(batch.experience.rope_positions)
        padding = (0, 0, 0, len(batch.padded_tokens) - len(of_rows))
        vars(sequences)[ROPE_POSITIONS] = torch.nn.functional.pad(of_rows, padding).T
    return sequences


def _show(
    images: TowerPass | None, number: int, model: LanguageModel, batch: MicroBatch, sequences: PackedSeqParams
) -> None:
    """Adds the images of micro-batch `number`, if the chunk has the embedding."""
    if images is not None:
        vars(sequences)[IMAGES] = images.shown(number, partial(model.rows_of_tokens, batch))


# Evaluation of a Megatron model.


class EvaluableModel(RoleModel):
    model: LanguageModel

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Implements RoleModel.evaluate_routing. Collective over: this replica."""
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
        """Implements RoleModel.forward. `found` is that of run_schedule."""
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


# The optimizer's state per parameter, for every class of optimizer.


def step_count(optimizer: MegatronOptimizer) -> Tensor | int:
    """Returns the number of steps of the optimizer: a number, or a tensor of its states. It is 0 without shares."""
    if own := stepping(members(optimizer)[0]):
        return own.num_steps
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return next((group["step"] for group in optimizer.param_groups if "step" in group), 0)
    # Every parameter has a gradient in every step, so one count holds for all.
    return next((state["step"] for _, state in optimizer.state.items()), 0)


def optimizer_name(optimizer: MegatronOptimizer) -> str:
    """Returns the value of config key optimizer.name."""
    own = stepping(members(optimizer)[0])
    return own.settings.name if own else "adamw"


def make_states(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Makes zero moments as in the optimizer's first step, with a step count of `num_steps`."""
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


# Memory parts of training in addition to the weights.


def training_parts(
    model: LanguageModel, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[str, MemoryPart]:
    """Returns the parts master_weights, optimizer and gradients. They share no memory with each other or with the
    weights.

    With fp32 weights the optimizer updates the weights themselves, and master_weights is empty. The host tensors of an
    optimizer with cpu_offload belong to the parts and stay on the host.
    """
    owned = [own for member in members(optimizer) if (own := stepping(member))]
    return {
        "master_weights": PartOnHost(
            lambda: _master_weights(model, optimizer), [master for own in owned for master in own.host_masters()]
        ),
        "optimizer": PartOnHost(lambda: _states(optimizer), [state for own in owned for state in own.host_states()]),
        # Megatron also keeps fp32 gradients of the master weights until it makes the next ones.
        "gradients": MemoryPart(lambda: _gradients(chunks), forget=lambda: optimizer.zero_grad(set_to_none=True)),
    }


def _master_weights(model: LanguageModel, optimizer: MegatronOptimizer) -> list[Tensor]:
    """Returns the master weights on the device, without views of the weights and without those on the host."""
    weights = {_storage(parameter) for parameter in model.parameters()}
    found = []
    for member in members(optimizer):
        own = stepping(member)
        keys = (key for group in member.param_groups for key in group["params"])
        found += [key for key in keys if _storage(key) not in weights and not (own and own.has_host_master(key))]
    return found


def _states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields moments and step counts. There are none before the first step."""
    for _, state in optimizer.state.items():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _storage(tensor: Tensor) -> int:
    """Returns an identifier of the storage. It also distinguishes empty storages."""
    return tensor.untyped_storage()._cdata


# A Megatron model with gradients and an optimizer.


class TrainableModel(EvaluableModel, TrainedModel):
    def make_optimizer(self) -> Mapping[str, MemoryPart]:
        model, settings, groups = self.model, self.settings, self.groups
        self.predicts = model.architecture.predicts
        parallel = data_parallel_config(settings, groups.dp_cp.size(), model.device)
        towers = [model.vision] if model.vision is not None and model.vision.is_trained else []
        self.chunks, self.towers = (
            [data_parallel(model.config, parallel, module, groups) for module in modules]
            for modules in (model.chunks, towers)
        )
        self.routers = Routers(model, model.architecture, model.moe, groups) if model.architecture.moe else None
        self._loads: Loads | None = None
        self.reduction, self.gather = (
            GradientReduction(self.chunks, self.towers),
            ParameterGather([*self.towers, *self.chunks]),
        )
        self.optimizer = build_optimizer(self.wrapped, settings.optimizer, groups)
        if is_replaced(settings.optimizer):
            replace_steps(model, self.optimizer, settings.optimizer)
        self.loss_scale = MegatronLossScale(self.optimizer, model.config)
        # Otherwise Megatron's schedules would reduce the gradients after every part of a mini-batch.
        model.config.finalize_model_grads_func = None
        return training_parts(model, self.wrapped, self.optimizer)

    @property
    def wrapped(self) -> list[DistributedDataParallel]:
        """The chunks and a trained tower with their gradient buffers. Chunks are first, where Megatron looks for the
        ends of a pipeline."""
        return [*self.chunks, *self.towers]

    def without_adapters(self) -> EvaluableModel:
        return EvaluableModel(self.model, is_base=True)

    def forget_gradients(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, temperature: float, *, is_whole: bool
    ) -> list[LossOutput]:
        """Adds gradients. For a whole mini-batch, their reduction begins during backward."""
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
    def looks_ahead(self) -> bool:
        return bool(self.predicts)

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
        finalize_model_grads(self.wrapped, None, pg_collection=self.groups)
        self.model.sum_gradients_of_copies()
        if self.model.adapters:
            self.model.adapters.sum_gradients_of_experts()
        self.gather.finish()
        for chunk in self.wrapped:
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
        """Adds the routers' biases, since they change with the experts' loads."""
        biases = {name: bias for name, bias in self.model.learned.items() if name.endswith(ROUTER_BIAS)}
        kept = {name: Optimized(bias, 0, is_shard=False, part="weights", moments={}) for name, bias in biases.items()}
        return kept | self.optimized()

    def answered_for(self, kept: Mapping[str, Optimized]) -> tuple[list[str], Array, Mapping[str, Range]]:
        """Each shard is saved by its owner. Of a parameter held whole by several ranks, each saves a part."""
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
    """Returns the range saved by rank number `index` of `replicas` ranks with the same parameter."""
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
            sight=site.sight(),
        )
        if lora:
            add_adapters(model, lora, site.config.seed)
        return model if trains else model.eval()
