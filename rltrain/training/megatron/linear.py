"""Megatron's parallel linear layers on CPUs, with matrix products by oneDNN.

In float32 torch takes MKL there, which uses half the width of the vector units of processors that are not Intel's.
oneDNN, which torch has as well, takes less than half of its time on those. It makes machine code for every number of
rows that is new, which takes as long as a small product: micro-batches keep to multiples of `rows_multiple`.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_ROWS = 64
"""Below it a call of oneDNN costs more than it saves."""


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()


def takes_onednn(rows: Tensor) -> bool:
    """Whether `rows_product` with these [n, inner] is oneDNN's."""
    return _serves(rows.device, rows.dtype) and len(rows) >= LEAST_ROWS


def rows_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """To a multiple of what a number of rows is best padded."""
    return LEAST_ROWS if _serves(device, dtype) else 1


def rows_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [n, inner] and matrix [m, inner] -> rows @ matrix.T [n, m], without a gradient."""
    if not takes_onednn(rows):
        return rows @ matrix.t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, None, "none", [], "")
    return product


def columns_product(left: Tensor, right: Tensor) -> Tensor:
    """left [rows, n] and right [rows, m] -> left.T @ right [n, m], without a gradient.

    oneDNN is faster where the narrower one's columns are its rows.
    """
    if not takes_onednn(left):
        return left.t() @ right
    if left.size(1) <= right.size(1):
        return rows_product(left.t(), right.t())
    return rows_product(right.t(), left.t()).t()


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return HAS_ONEDNN and dtype == torch.float32 and device.type == "cpu"


class Product(torch.autograd.Function):
    """inputs [..., inner] @ weight [outer, inner].T. Of a frozen weight the inputs are not kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = inputs.shape
        return rows_product(inputs.flatten(0, -2), weight).view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_rows = gradients[0].flatten(0, -2)
        of_inputs = rows_product(of_rows, weight.t()).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return of_inputs, columns_product(of_rows, inputs.flatten(0, -2)) if ctx.needs_input_grad[1] else None


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
