"""Products in half precision with fp32 sums, rounding to INT4, and gpt-oss's activation."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Products of weights in half precision whose sums stay in fp32. Apart from its siblings because it loads torch.
#
# Products of two numbers in half precision are exact in fp32, so that nothing but the sums is rounded.

_CHUNK_ELEMENTS = 1 << 20
"""Of a matrix that are converted at a time where there is no such product: few enough for a processor's cache."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., columns], weight [rows, columns] of one type -> x @ weight.T [..., rows] fp32. Not differentiable where
    that type is not fp32."""
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


# INT4 in groups, and what is left of weights that were in it.
#
# A row of a matrix is cut into groups of `group_size` consecutive elements, its last one shorter where they do not
# divide
# it. Per group, of weights x of some dtype:
#
#     scale = max |x| / scale_divisor in float32, rounded to that dtype
#     q     = x / scale in float32, rounded to the nearest integer, of two to the even one, and cut to [-8, 7]
#     x'    = q * scale in float32, rounded to that dtype
#
# With a divisor of 7 no q is -8: what slime trains with, and Kimi K2-Thinking was made by; 7.5 is what llm-compressor
# rounds by. Scales are of the weights' dtype because packed checkpoints and the kernels that multiply by them have
# them
# so. A group whose scale is zero is all zeros; one with an infinity or a NaN is NaN.

SMALLEST, LARGEST = -8, 7
AT_ONCE_ELEMENTS = 2**24
"""Whose float32 copies exist at a time."""


@torch.no_grad()
def int4_rounded(x: Tensor, group_size: int, scale_divisor: float) -> Tensor:
    """What `x` [..., inputs] is after it was in INT4: of the same shape and dtype, in memory of its own."""
    rows = x.reshape(-1, x.shape[-1])
    made = torch.empty_like(rows, memory_format=torch.contiguous_format)
    num_rows = max(1, AT_ONCE_ELEMENTS // max(1, x.shape[-1]))
    for part, into in zip(rows.split(num_rows), made.split(num_rows), strict=True):
        _round(part, into, group_size, scale_divisor)
    return made.view(x.shape)


def _round(rows: Tensor, into: Tensor, group_size: int, scale_divisor: float) -> None:
    inputs = rows.shape[-1]
    missing = -inputs % group_size
    whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows  # pad copies whatever it adds
    groups = whole.unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1, keepdim=True).float()
    # A tensor, because torch multiplies by the rounded reciprocal of a number.
    scale = (amax / torch.full_like(amax, scale_divisor)).to(rows.dtype).float()
    q = (groups.float() / scale.masked_fill(scale == 0, 1.0)).round_().clamp_(SMALLEST, LARGEST)
    into.copy_(q.mul_(scale).flatten(-2)[..., :inputs])


# gpt-oss's activation of experts. Apart from its siblings because it loads torch.

ALPHA = 1.702
"""With which x * sigmoid(ALPHA * x) is near GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""
LIMIT = 7.0


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 n] -> [..., n], of gates g and what they gate u, which lie in turn: g * sigmoid(ALPHA * g) * (u + 1), of
    g at most LIMIT and of u between -LIMIT and LIMIT."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (ALPHA * gate).sigmoid() * (up + 1)
