"""What a model says of every token, by its head: the numbers that its loss function gets."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rltrain.models.architecture import Head
from rltrain.training.megatron.forward import token_logprobs
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.packing import MicroBatch


@dataclass(frozen=True)
class Objective:
    """`token_outputs` takes (model, micro-batch, the last stage's output for its tokens, temperature) and gives the
    `num_outputs` tensors [tokens] that the loss function takes, differentiable, of which an evaluation gives the first.
    It may be collective over the tensor-parallel group.
    """

    token_outputs: Callable[[LanguageModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    num_outputs: int


def _scores(model: LanguageModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
    return (outputs,)


POLICY = Objective(token_logprobs, num_outputs=2)
"""Loss functions get the log-prob of every token, and the entropy of the distribution that it was drawn from."""

SCORE = Objective(_scores, num_outputs=1)
"""Loss functions get at every token the score of its sample up to and with it. Temperature plays no part."""

OBJECTIVES: dict[Head, Objective] = {"vocabulary": POLICY, "value": SCORE}
