"""Micro-batches through Megatron's schedules, and what comes out of them by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.runtime.process_groups import plain_group
from rltrain.training.megatron.linear import rows_multiple
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.megatron.prediction import Predicted, tell_following, with_loss
from rltrain.training.megatron.replayed_batch import given_choices
from rltrain.training.megatron.router_replay import Choices, tell_choices
from rltrain.training.megatron.routing import routed_samples, tell_routers
from rltrain.training.megatron.stage_messages import stage_messages
from rltrain.training.packing import MicroBatch, pack, padded_to, padding_alone
from rltrain.training.trainable import Outputs

PIPELINED = (forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving)


def make_micro_batches(model: LanguageModel, experience: Experience, max_tokens: int) -> list[MicroBatch]:
    """`experience` in micro-batches that `model` can take: this rank's slices of them, padded for sequence and pipeline
    parallelism and for fast matrix products. `max_tokens` is for each rank of context parallelism.

    Stages of a pipeline receive tensors of one shape, so there all micro-batches are padded to one length; balanced
    packing keeps that padding small, and no shapes have to be sent. Interleaved stages take micro-batches in rounds of
    as many as there are stages.

    Where replicas hold experts for each other all get as many micro-batches, of which some have no samples: none can
    compute alone. With dispatcher allgather these have one length, too. Collective over: all replicas, there.
    """
    config, share = model.config, model.share
    of_rank = math.lcm(
        rows_multiple(model.device, config.params_dtype),
        config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )
    multiple_of = share.size * of_rank
    batches = []
    if experience.num_samples:
        batches = pack(
            experience,
            max_tokens * share.size,
            device=model.device,
            multiple_of=multiple_of,
            equal_lengths=config.pipeline_model_parallel_size > 1,
            count_multiple_of=config.pipeline_model_parallel_size if len(model.chunks) > 1 else 1,
            share=share,
        )
    least = math.lcm(of_rank, share.multiple // share.size)
    return _as_many_everywhere(model, batches, experience, least) if model.shares_experts else batches


def _as_many_everywhere(
    model: LanguageModel, batches: list[MicroBatch], experience: Experience, least: int
) -> list[MicroBatch]:
    """`batches`, and others of padding alone, as many as the replica has that has most: of `least` rows on each rank
    where this one has no others."""
    longest = max((len(batch.padded_tokens) for batch in batches), default=0)
    sizes = torch.tensor([len(batches), longest], device=model.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=model.pg_collection.tp_dp_cp)
    count, longest_of_all = sizes.tolist()
    length = longest or least
    if model.config.moe_token_dispatcher_type == "allgather":
        length = longest_of_all
        batches = [padded_to(batch, length, model.share) for batch in batches]
    return batches + [padding_alone(experience, length, model.device, model.share)] * (count - len(batches))


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
