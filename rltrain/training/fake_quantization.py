"""Experts with rounded weights in every backend: config.model.fake_quantization.

The trained weights stay unrounded. They get the gradient of the rounded weights, as if rounding were the identity. This
is the straight-through estimator: Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons".
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rltrain.config.models import FakeQuantization
from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from rltrain.training.adapters import MadeWeights


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group_size: int, scale_divisor: float) -> Tensor:
        return int4_rounded(weight, group_size, scale_divisor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def rounded(weight: Tensor, settings: FakeQuantization) -> Tensor:
    """Returns the rounded `weight` [..., outputs, inputs]. Gradients pass unchanged to `weight`."""
    made: Tensor = _StraightThrough.apply(weight, settings.group_size, settings.scale_divisor)
    return made


def rounded_weights(
    weights: Mapping[str, Tensor], settings: FakeQuantization | None, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Returns `weights` by name, with experts rounded as in a model that computes in `dtype`.

    Each rounded weight is computed on access and keeps its own type.
    """
    if settings is None:
        return weights

    def made(name: str, weight: Tensor) -> Tensor:
        if not is_expert(name):
            return weight
        computed = weight.detach().to(dtype)
        return int4_rounded(computed, settings.group_size, settings.scale_divisor).to(weight.dtype)

    return MadeWeights(weights, made)
