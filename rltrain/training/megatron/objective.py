"""What a model says of every token, by its head: the numbers that its loss function gets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.divergence import asked_tokens
from rltrain.data.experience import Experience
from rltrain.models.architecture import Head
from rltrain.training.megatron.context_parallel import of_all_tokens
from rltrain.training.megatron.forward import token_logprobs
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.packing import MicroBatch


@dataclass(frozen=True)
class Objective:
    """`token_outputs` takes (model, micro-batch, the last stage's output for its rows, temperature) and gives the
    tensors [tokens, ...] that the loss function takes, differentiable, of which an evaluation gives the first. It may
    be collective over the tensor- and context-parallel groups. `of_nothing` gives them for experience without samples.
    """

    token_outputs: Callable[[LanguageModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    of_nothing: Callable[[Experience], tuple[Tensor, ...]]


def _scores(model: LanguageModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
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
