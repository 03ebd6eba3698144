"""Layers for CPUs: norms, activations and rotation with few passes over memory, and matrix products by oneDNN."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

# Autograd functions with few passes over memory, for CPUs.
#
# On CPUs torch makes a pass, and in backward several, for each operation of a formula. Each function here computes a
# whole formula, and is differentiable once.

Gradients = tuple[Tensor | None, ...]


def takes_fused(x: Tensor) -> bool:
    """Returns whether these functions are faster than torch's.

    On GPUs torch has better kernels, and in half precision it rounds differently.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class RmsNorm(torch.autograd.Function):
    """Computes x [..., n] / sqrt(mean x^2 + eps) * weight [n] (Zhang and Sennrich 2019, "Root Mean Square Layer
    Normalization")."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _inverse_rms(x, eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        normed, scale, weight = ctx.saved_tensors
        of_weight = gradients[0] * normed
        along = (of_weight @ weight)[..., None] / len(weight)
        of_input = (gradients[0] * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_input, of_weight.flatten(0, -2).sum(0), None


class SwiGlu(torch.autograd.Function):
    """Computes silu(gate) * up for gate and up side by side: [..., 2 n] to [..., n] (Shazeer 2020, "GLU Variants
    Improve Transformer")."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(gradients[0], activated, out=of_up)
        of_activated = torch.mul(gradients[0], up, out=activated)
        torch.ops.aten.silu_backward.grad_input(of_activated, gate, grad_input=of_gate)
        return result


class GatedActivation(torch.nn.Module):
    """The gated activation of an MLP, with the constructor expected by Megatron.

    GELU is the tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), as in Megatron's fused
    version.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        activate = config.activation_func
        self.activate = partial(F.gelu, approximate="tanh") if activate is F.gelu else activate

    def forward(self, gate_up: Tensor) -> Tensor:
        if self.activate is F.silu and takes_fused(gate_up):
            activated: Tensor = SwiGlu.apply(gate_up)
            return activated
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self.activate(gate) * up
        return product

    def sharded_state_dict(self, *unused: Any, **also_unused: Any) -> dict[str, Any]:
        """Returns an empty dict. Megatron's checkpoints call it for every module of an MLP."""
        return {}


class TurnedHeads(torch.autograd.Function):
    """Normalizes and rotates queries and keys of heads [tokens, groups, heads of a group, head_dim] for attention.

    The last head of a group is the values. Queries and keys are normalized if `weight` [heads of a group, head_dim] is
    given.

    A rotation treats elements i and i + size / 2 of the first `size` elements of a head as a point in the plane (Su et
    al. 2021, "RoFormer"). `cos` and `sin` have the shape of the heads. The sines of the first half are negative.

    All arithmetic includes the values and the elements after `size`, because contiguous memory is faster. They have
    weight and cosine 1 and sine 0.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, size: int
    ) -> Tensor:
        ctx.size = size
        if weight is None:
            ctx.save_for_backward(cos, sin)
            return _rotated(heads, cos, sin, size)
        scale = _inverse_rms(heads, eps)
        scale[:, :, -1] = 1
        normed = heads * scale
        ctx.save_for_backward(cos, sin, normed, scale, weight)
        return _rotated(normed * weight, cos, sin, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        cos, sin, *of_norm = ctx.saved_tensors
        of_straight = _rotated(gradients[0], cos, sin, ctx.size, forwards=False)
        if not of_norm:
            return of_straight, None, None, None, None, None
        normed, scale, weight = of_norm
        of_weight = of_straight * normed
        along = _mean(of_weight * weight)
        along[:, :, -1] = 0
        of_heads = of_straight.mul_(weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_heads, of_weight.flatten(0, 1).sum(0), None, None, None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, size: int, *, forwards: bool = True) -> Tensor:
    first, second, rest = heads.split([size // 2, size // 2, heads.size(-1) - size], dim=-1)
    swapped = torch.cat([second, first, rest], dim=-1)
    return (heads * cos).addcmul_(swapped, sin, value=1 if forwards else -1)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(mean x^2 + eps), [..., 1]."""
    return _mean(x * x).add_(eps).rsqrt_()


def _mean(x: Tensor) -> Tensor:
    """Returns the mean over the last dimension, kept with size 1. A product is faster here than a sum."""
    size = x.size(-1)
    return x @ x.new_full((size, 1), 1 / size)


# Megatron's parallel linear layers on CPUs, with matrix products by oneDNN.
#
# In float32 torch uses MKL. On processors not made by Intel, MKL uses half the width of the vector units. There oneDNN,
# part of torch as well, takes less than half of MKL's time. oneDNN compiles code for every new number of rows, at the
# cost of a small product. So micro-batches are padded to multiples of `rows_multiple`.

LEAST_ROWS = 64
"""With fewer rows a call of oneDNN costs more than it saves."""


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()


def takes_onednn(rows: Tensor) -> bool:
    """Returns whether `rows_product` uses oneDNN for these rows [n, inner]."""
    return _serves(rows.device, rows.dtype) and len(rows) >= LEAST_ROWS


def rows_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """Returns the best multiple for padding the number of rows."""
    return LEAST_ROWS if _serves(device, dtype) else 1


def rows_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Returns rows @ matrix.T [n, m] of rows [n, inner] and matrix [m, inner], without a gradient."""
    if not takes_onednn(rows):
        return rows @ matrix.t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, None, "none", [], "")
    return product


def columns_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left.T @ right [n, m] of left [rows, n] and right [rows, m], without a gradient.

    oneDNN is faster if the columns of the narrower one are its rows.
    """
    if not takes_onednn(left):
        return left.t() @ right
    if left.size(1) <= right.size(1):
        return rows_product(left.t(), right.t())
    return rows_product(right.t(), left.t()).t()


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return HAS_ONEDNN and dtype == torch.float32 and device.type == "cpu"


class Product(torch.autograd.Function):
    """Computes inputs [..., inner] @ weight [outer, inner].T. For a frozen weight the inputs are not kept."""

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
    """A mixin of parallel linear layers with oneDNN's product. Everything else is Megatron's.

    With sequence parallelism the product is Megatron's too, since it overlaps with communication.
    """

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
