"""Micro-batches through Megatron's schedules, and what comes out of them by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from rltrain.algorithms.divergence import asked_tokens
from rltrain.cluster.reopenable_group import plain_group
from rltrain.data.experience import Experience
from rltrain.training.megatron.linear import rows_multiple
from rltrain.training.megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_top
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.packing import MicroBatch, pack

Outputs = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, its local logits [tokens, columns], or scores [tokens]) -> (loss scalar, anything to keep)."""


def make_micro_batches(model: LanguageModel, experience: Experience, max_tokens: int) -> list[MicroBatch]:
    """`experience` in micro-batches that `model` can take: padded for sequence and pipeline parallelism, and for fast
    matrix products.

    Stages of a pipeline receive tensors of one shape, so there all micro-batches are padded to one length; balanced
    packing keeps that padding small, and no shapes have to be sent.
    """
    config = model.config
    multiple = rows_multiple(model.device, config.params_dtype)
    return pack(
        experience,
        max_tokens,
        device=model.device,
        multiple_of=math.lcm(multiple, config.tensor_model_parallel_size if config.sequence_parallel else 1),
        equal_lengths=config.pipeline_model_parallel_size > 1,
    )


def run_schedule(
    model: torch.nn.Module, micro_batches: Sequence[MicroBatch], outputs: Outputs, *, backward: bool
) -> list[Any]:
    """Run forward (and backward) over the micro-batches; what `outputs` kept of each, on the last pipeline stage only.

    `model` is a LanguageModel or its data-parallel wrapper. Losses are summed: nothing is divided by the number of
    micro-batches, and no gradient is reduced. Collective over: the model-parallel group of this replica.
    """
    language_model = cast(LanguageModel, unwrap_model(model))
    groups, config = language_model.pg_collection, language_model.config

    def step(batches: Iterator[MicroBatch], _: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        language_model.on_micro_batch(batch.lengths, backward)
        hidden_or_logits = model(
            input_ids=batch.padded_tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=language_model.sequences(batch.segments),
        )

        def last_stage(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, kept = outputs(batch, logits[0, : batch.num_tokens])
            # Megatron would divide by this count; TrainableModel divides, once all parts of a mini-batch are there.
            return loss, torch.zeros((), dtype=torch.int), kept

        return hidden_or_logits, last_stage

    arguments: dict[str, Any] = {
        "forward_step_func": step,
        "data_iterator": iter(micro_batches),
        "model": model,
        "num_microbatches": len(micro_batches),
        "seq_length": len(micro_batches[0].padded_tokens),
        "micro_batch_size": 1,
        "forward_only": not backward,
        "pg_collection": groups,
    }
    if groups.pp.size() == 1:
        return forward_backward_no_pipelining(**arguments)
    return forward_backward_pipelining_without_interleaving(
        **arguments, p2p_communicator=P2PCommunicator(plain_group(groups.pp), config)
    )


def token_logprobs(model: LanguageModel, batch: MicroBatch, logits: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-prob of every token given those before it in its sample, and the entropy of the distribution it was drawn
    from; both [tokens] fp32, 0 at a sample's first token. Where the experience asks for others, their log-probs as
    well, [tokens, n]. Collective over: the tensor-parallel group."""
    labels, asked = batch.experience.tokens, asked_tokens(batch.experience)
    if asked is not None:
        labels = torch.cat([labels[:, None], asked], dim=1)
    logprobs, entropy = vocab_parallel_logprobs(
        logits,
        labels.roll(-1, dims=0),
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        group=model.pg_collection.tp,
    )
    if asked is None:
        return at_drawn(batch, logprobs), at_drawn(batch, entropy)
    return at_drawn(batch, logprobs[:, 0]), at_drawn(batch, entropy), at_drawn(batch, logprobs[:, 1:])


def likeliest_tokens(
    model: LanguageModel, batch: MicroBatch, logits: Tensor, temperature: float, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens in the place of every token and their log-probs, [tokens, count], 0 at a sample's
    first token. Collective over: the tensor-parallel group."""
    ids, logprobs = vocab_parallel_top(
        logits,
        count,
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        group=model.pg_collection.tp,
    )
    return at_drawn(batch, ids), at_drawn(batch, logprobs)


def at_drawn(batch: MicroBatch, of_context: Tensor) -> Tensor:
    """What a model makes of a sample's tokens up to and with each one, at the index of the token that follows; 0 at a
    sample's first token. Gradients flow."""
    moved = of_context.roll(1, dims=0)
    drawn = torch.ones(batch.num_tokens, dtype=moved.dtype, device=moved.device)
    drawn[batch.experience.offsets()[:-1]] = 0
    return moved * drawn.view(-1, *[1] * (moved.dim() - 1))
