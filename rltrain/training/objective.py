"""What a model says of every token, by its head: the numbers that its loss function gets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rltrain.algorithms.kl import asked_tokens
from rltrain.data.experience import Experience
from rltrain.models.architecture import Architecture, Head
from rltrain.training.gathered_rows import of_all_tokens
from rltrain.training.logprobs import Logits, vocab_parallel_logprobs, vocab_parallel_squares, vocab_parallel_top
from rltrain.training.packing import MicroBatch


class PackedModel(Protocol):
    """A backend's model as far as it is asked here."""

    architecture: Architecture
    pg_collection: Any
    """With process groups `tp`, over which the logits' columns are spread, and `cp`, which shares sequences."""

    def logits_of(self, outputs: Tensor) -> Logits:
        """What it put out for some rows, [rows, ...], as logits."""
        ...


@dataclass(frozen=True)
class Objective:
    """`token_outputs` takes (model, micro-batch, the last stage's output for its rows, temperature) and gives the
    tensors [tokens, ...] that the loss function takes, differentiable, of which an evaluation gives the first. It may
    be collective over the tensor- and context-parallel groups. `of_nothing` gives them for experience without samples.
    """

    token_outputs: Callable[[PackedModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    of_nothing: Callable[[Experience], tuple[Tensor, ...]]


def token_logprobs(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-prob of every token given those before it in its sample, and the entropy of the distribution it was drawn
    from; both [tokens] fp32, 0 at a sample's first token. Where the experience asks for others, their log-probs as
    well, [tokens, n]. Collective over: the tensor- and context-parallel groups."""
    labels, asked = batch.experience.tokens, asked_tokens(batch.experience)
    if asked is not None:
        labels = torch.cat([labels[:, None], asked], dim=1)
    logprobs, entropy = vocab_parallel_logprobs(
        model.logits_of(outputs),
        batch.rows_of(labels.roll(-1, dims=0)),
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        group=model.pg_collection.tp,
    )
    logprobs, entropy = (at_drawn(model, batch, of_rows) for of_rows in (logprobs, entropy))
    return (logprobs, entropy) if asked is None else (logprobs[:, 0], entropy, logprobs[:, 1:])


def likeliest_tokens(
    model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens in the place of every token and their log-probs, [tokens, count], 0 at a sample's
    first token. Collective over: the tensor- and context-parallel groups."""
    ids, logprobs = vocab_parallel_top(
        model.logits_of(outputs),
        count,
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        group=model.pg_collection.tp,
    )
    return at_drawn(model, batch, ids), at_drawn(model, batch, logprobs)


def squared_probabilities(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> Tensor:
    """[tokens] in the place of every token the sum of the squares of all tokens' probabilities, 0 at a sample's first
    one. Collective over: the tensor- and context-parallel groups."""
    squares = vocab_parallel_squares(
        model.logits_of(outputs),
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        group=model.pg_collection.tp,
    )
    return at_drawn(model, batch, squares)


def at_drawn(model: PackedModel, batch: MicroBatch, of_rows: Tensor) -> Tensor:
    """[tokens, ...] what a model makes of a sample's tokens up to and with each one, at the index of the token that
    follows; 0 at a sample's first token. Gradients flow. Collective over: the context-parallel group."""
    moved = of_all_tokens(batch, of_rows, model.pg_collection.cp).roll(1, dims=0)
    drawn = torch.ones(batch.num_tokens, dtype=moved.dtype, device=moved.device)
    drawn[batch.experience.offsets()[:-1]] = 0
    return moved * drawn.view(-1, *[1] * (moved.dim() - 1))


def _scores(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
    return (of_all_tokens(batch, outputs, model.pg_collection.cp),)


def _no_logprobs(experience: Experience) -> tuple[Tensor, ...]:
    asked = asked_tokens(experience)
    return torch.zeros(0), torch.zeros(0), *([] if asked is None else [torch.zeros(asked.shape)])


def _no_scores(experience: Experience) -> tuple[Tensor]:
    return (torch.zeros(0),)


POLICY = Objective(token_logprobs, _no_logprobs)
"""Loss functions get the log-prob of every token, and the entropy of the distribution that it was drawn from; then the
log-probs of other tokens in its place, where the experience names such."""

SCORE = Objective(_scores, _no_scores)
"""Loss functions get at every token the score of its sample up to and with it. Temperature plays no part."""

OBJECTIVES: dict[Head, Objective] = {"vocabulary": POLICY, "value": SCORE}
