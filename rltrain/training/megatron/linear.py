"""Megatron's parallel linear layers on CPUs, with the matrix products of rltrain.models.products."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.products import rows_product, takes_onednn


class Product(torch.autograd.Function):
    """inputs [..., inner] @ weight [outer, inner].T."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return rows_product(inputs.flatten(0, -2), weight).view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_rows, rows = gradients[0].flatten(0, -2), inputs.flatten(0, -2)
        of_inputs = rows_product(of_rows, weight.t()).view_as(inputs) if ctx.needs_input_grad[0] else None
        return of_inputs, _columns_product(of_rows, rows) if ctx.needs_input_grad[1] else None


def _columns_product(left: Tensor, right: Tensor) -> Tensor:
    """left [rows, n].T @ right [rows, m]. oneDNN is faster with the narrower one's columns as rows."""
    if not takes_onednn(left):
        return left.t() @ right
    if left.size(1) <= right.size(1):
        return rows_product(left.t(), right.t())
    return rows_product(right.t(), left.t()).t()


class _Product:
    """Of a parallel linear layer: everything but the product stays Megatron's, which also has the sequence-parallel
    case to itself, where communication goes on meanwhile."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: dist.ProcessGroup | None,
        **settings: Any,
    ) -> Any:
        if sequence_parallel or not takes_onednn(input.flatten(0, -2)):
            settings |= {"sequence_parallel": sequence_parallel, "allreduce_dgrad": allreduce_dgrad}
            base: Any = super()
            return base._forward_impl(input=input, weight=weight, bias=bias, tp_group=tp_group, **settings)
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        outputs = Product.apply(input, weight)
        return outputs if bias is None else outputs + bias


class ColumnProduct(_Product, ColumnParallelLinear):
    pass


class RowProduct(_Product, RowParallelLinear):
    pass
