"""Micro-batches through Megatron's schedules: evaluation, messages between stages, replayed routing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from rltrain.reshard.megatron_layout import chunks_of
from rltrain.runtime.process_groups import plain_group
from rltrain.training.megatron.experts import Choices, routed_samples, tell_choices, tell_routers
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.megatron.prediction import Predicted, tell_following, with_loss
from rltrain.training.packing import MicroBatch, of_all_tokens
from rltrain.training.trainable import Outputs, RoleModel

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
    """The packed sequences, with what routers are to know of them."""
    sequences = model.sequences(batch.segments)
    if shares is not None and model.architecture.moe:
        tell_routers(sequences, routed_samples(batch, shares(batch.experience)))
    given = given_choices(model, batch)
    if given or found is not None:
        tell_choices(sequences, Choices(given, found))
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
