"""A residual stream and a final projection in fp32, in models whose weights are in half precision.

Megatron's fp32_residual_connection makes the embedding fp32, and its first addition to the residual stream rounds that
again; the additions here keep it as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from rltrain.models.products import wide_product

Addition = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def residual_addition(training: bool, fused: bool) -> Addition:
    """In the place of Megatron's get_bias_dropout_add: the sum has the wider type of the two. There is no dropout."""
    return _add_to_residual


def _add_to_residual(added: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    x, bias = added
    total = residual + x
    return total if bias is None else total + bias


class RoundedInput(torch.nn.Module):
    """Stands where a norm is, in layers whose norms are fused with the product behind them: these take the weights'
    type alone."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()
        self.dtype = config.params_dtype

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype)


def widen_residual_stream(block: TransformerBlockSubmodules) -> None:
    """Have the layers of a block keep what they add to as wide as it comes."""
    for layer in block.layer_specs or ():
        modules = layer.submodules
        modules.self_attn_bda = modules.mlp_bda = residual_addition
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            if getattr(modules, norm) is IdentityOp:
                setattr(modules, norm, RoundedInput)


class WideProjection(ColumnParallelLinear):
    """Megatron's vocabulary projection, whose logits are fp32. Gradients are made in the weights' type, as before."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        logits: Tensor = _WideProduct.apply(input, weight)
        return logits


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gradient @ weight, of_weight


def widen_projection(layer: ColumnParallelLinear) -> None:
    """Megatron makes the layer itself, of a class that it does not let choose."""
    layer.__class__ = WideProjection
