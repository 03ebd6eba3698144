"""A value model's estimates, token by token."""

from functools import partial

import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.training.megatron.forward import evaluate_tokens
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.megatron.packing import MicroBatch


def token_values(model: LanguageModel, batch: MicroBatch, outputs: Tensor) -> Tensor:
    """[tokens] fp32: at every token the value of the state before it was drawn, 0 at a sample's first token.

    `outputs` [tokens] are what `model` makes of a sample's tokens up to and with each one. Gradients flow to them.
    ValueError where `model` has no value head.
    """
    if model.architecture.head != "value":
        raise ValueError(f"values come from a value head; this model has the {model.architecture.head} head")
    drawn = torch.ones(batch.num_tokens, device=outputs.device)
    drawn[batch.experience.offsets()[:-1]] = 0
    return outputs.roll(1) * drawn


def compute_values(model: LanguageModel, experience: Experience, *, max_tokens: int) -> Tensor:
    """[tokens] fp32 host values of the replica's samples under `model`, where token_values has them; otherwise as
    `evaluate_tokens`."""
    return evaluate_tokens(model, experience, partial(token_values, model), max_tokens)
