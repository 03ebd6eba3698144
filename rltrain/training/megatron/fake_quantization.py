"""Megatron's experts, its own or Transformer Engine's, computing with rounded weights."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from rltrain.config.schema import FakeQuantization
from rltrain.errors import ConfigError
from rltrain.models.experts import is_expert
from rltrain.training.fake_quantization import rounded

PRODUCT, WEIGHTS = "_forward_impl", "_get_weight_tensors"
"""What Megatron's linear layers call with their weight, and what Transformer Engine's grouped ones call for theirs."""


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Have the matrices of experts in `model` be rounded in every pass. ConfigError where the installed Transformer
    Engine lets nobody do so."""
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters() if is_expert(name)}
    for name in sorted(holders):
        layer: Any = model.get_submodule(name)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            setattr(layer, PRODUCT, _of_rounded(getattr(layer, PRODUCT), settings))
        elif hasattr(layer, WEIGHTS):
            setattr(layer, WEIGHTS, _all_rounded(getattr(layer, WEIGHTS), settings))
        else:
            raise ConfigError(
                f"model.fake_quantization: the experts of the installed Transformer Engine ({type(layer).__name__}) "
                f"have no {WEIGHTS}, by which their weights could be rounded; expected a release that has it, or "
                "model.transformer_impl: local"
            )


def _of_rounded(product: Callable[..., Any], settings: FakeQuantization) -> Callable[..., Any]:
    def multiplied(*, weight: Tensor, **others: Any) -> Any:
        return product(weight=rounded(weight, settings), **others)

    return multiplied


def _all_rounded(weights: Callable[[], list[Tensor]], settings: FakeQuantization) -> Callable[[], list[Tensor]]:
    return lambda: [rounded(weight, settings) for weight in weights()]
