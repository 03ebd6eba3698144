"""Products in half precision with fp32 sums, rounding to INT4, and gpt-oss's activation. Loads torch."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Products of half-precision weights with fp32 sums.
#
# The product of two half-precision numbers is exact in fp32, so only the sums are rounded.

_CHUNK_ELEMENTS = 1 << 20
"""Elements of a matrix to convert at a time on devices without such a product. They fit into a processor's cache."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T in fp32, shape [..., rows]. x [..., columns] and weight [rows, columns] have the same dtype.
    Only differentiable for fp32 inputs."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    flat = x.flatten(0, -2)
    if x.device.type == "cuda":
        product = torch.mm(flat, weight.t(), out_dtype=torch.float32)
    else:
        product = torch.empty(len(flat), len(weight), dtype=torch.float32, device=x.device)
        count = max(1, _CHUNK_ELEMENTS // weight.size(1))
        for first in range(0, len(weight), count):
            rows = slice(first, first + count)
            product[:, rows] = F.linear(flat.float(), weight[rows].float())
    return product.view(*x.shape[:-1], len(weight))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which is fp32 or has the type of both."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cpu":
        total += left @ right
    elif adds_products(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch adds products of factors in `dtype` to an fp32 matrix in place. Some releases refuse it."""
    total, factor = torch.full((16, 16), 2.0**-10, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # no such operator, or not for these types
        return False
    return bool((total == 16 + 2.0**-10).all())


# INT4 in groups, and weights after rounding to it.
#
# A row of a matrix is cut into groups of `group_size` consecutive elements. The last group can be shorter. For weights
# x of some dtype, each group has:
#
#     scale = max |x| / scale_divisor in float32, rounded to that dtype
#     q     = x / scale in float32, rounded to the nearest integer (ties to even), and clamped to [-8, 7]
#     x'    = q * scale in float32, rounded to that dtype
#
# With a divisor of 7 no q is -8. slime trains with 7, and Kimi K2-Thinking was made with it. llm-compressor rounds with
# 7.5. Scales have the weights' dtype, as in packed checkpoints and in kernels. A group with scale zero is all zeros. A
# group with an infinity or a NaN is NaN.

SMALLEST, LARGEST = -8, 7
AT_ONCE_ELEMENTS = 2**24
"""Elements with float32 copies at a time."""


@torch.no_grad()
def int4_rounded(x: Tensor, group_size: int, scale_divisor: float) -> Tensor:
    """Returns `x` [..., inputs] after rounding to INT4 and back. The result is new memory of the same shape and
    dtype."""
    rows = x.reshape(-1, x.shape[-1])
    made = torch.empty_like(rows, memory_format=torch.contiguous_format)
    num_rows = max(1, AT_ONCE_ELEMENTS // max(1, x.shape[-1]))
    for part, into in zip(rows.split(num_rows), made.split(num_rows), strict=True):
        _round(part, into, group_size, scale_divisor)
    return made.view(x.shape)


def _round(rows: Tensor, into: Tensor, group_size: int, scale_divisor: float) -> None:
    inputs = rows.shape[-1]
    missing = -inputs % group_size
    whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows  # pad copies even if it adds nothing
    groups = whole.unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1, keepdim=True).float()
    # A tensor, because torch multiplies by the rounded reciprocal of a number.
    scale = (amax / torch.full_like(amax, scale_divisor)).to(rows.dtype).float()
    q = (groups.float() / scale.masked_fill(scale == 0, 1.0)).round_().clamp_(SMALLEST, LARGEST)
    into.copy_(q.mul_(scale).flatten(-2)[..., :inputs])


# gpt-oss's activation of experts.

ALPHA = 1.702
"""With this factor x * sigmoid(ALPHA * x) approximates GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415, section
2)."""
LIMIT = 7.0


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Returns g * sigmoid(ALPHA * g) * (u + 1), shape [..., n]. The input [..., 2 n] interleaves gates g and up
    projections u. g is clamped to at most LIMIT, and u to between -LIMIT and LIMIT."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (ALPHA * gate).sigmoid() * (up + 1)
