"""What a model is for, by its head: the numbers per token that its loss function gets, and what is reported of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms import correction, value
from rltrain.algorithms.divergence import asked_tokens
from rltrain.data.experience import Experience
from rltrain.models.architecture import Head
from rltrain.training.megatron.forward import token_logprobs, token_values
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.packing import MicroBatch

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Objective:
    """`role` is the name in config keys and messages.

    `token_outputs` takes (model, micro-batch, the last stage's output for its tokens, temperature) and gives the
    tensors [tokens, ...] that the loss function takes, differentiable, of which an evaluation gives the first. It may
    be collective over the tensor-parallel group. `of_nothing` gives them for experience without samples. `summarize`
    makes a mini-batch's reported metrics from the means of the loss function's sums.
    """

    role: str
    token_outputs: Callable[[LanguageModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    of_nothing: Callable[[Experience], tuple[Tensor, ...]]
    summarize: Callable[[Metrics], dict[str, float]] = dict


def _token_values(model: LanguageModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
    return (token_values(batch, outputs),)


def _no_logprobs(experience: Experience) -> tuple[Tensor, ...]:
    asked = asked_tokens(experience)
    return torch.zeros(0), torch.zeros(0), *([] if asked is None else [torch.zeros(asked.shape)])


def _no_values(experience: Experience) -> tuple[Tensor]:
    return (torch.zeros(0),)


POLICY = Objective("actor", token_logprobs, _no_logprobs, summarize=correction.summarize)
"""Loss functions get the log-prob of every token, and the entropy of the distribution that it was drawn from; then the
log-probs of other tokens in its place, where the experience names such."""

VALUE = Objective("critic", _token_values, _no_values, summarize=value.summarize)
"""Loss functions get the value of the state before every token. Temperature plays no part."""

OBJECTIVES: dict[Head, Objective] = {"vocabulary": POLICY, "value": VALUE}
