"""FP8 in blocks, as torch operations: the reference that the kernels equal bit for bit.

A matrix [R, C] is cut into blocks of 128 x 128 elements, partial ones at its right and lower edges. Per block, in
float32:

    amax    = max |x|, NaN if any x is NaN
    a       = max(amax, 2**-100)
    scale   = a / 448
    inverse = 448 / a
    q       = x * inverse, rounded to nearest even in e4m3, saturated at 448

448 is the largest e4m3 number, and x is about q * scale. Where amax is not finite, scale is the NaN 0x7fc00000 and
every q is the NaN 0x7f.

Both quotients are rounded from the exact ones: divisor and dividend are tensors, because torch replaces the division of
a tensor by a Python number, and of a Python number by a tensor, by a multiplication with a rounded reciprocal.
"""

import torch
from torch import Tensor

from rltrain.reshard.kernels.slices import BLOCK

MAX_FLOAT8 = 448.0
SMALLEST_AMAX = 2.0**-100
NAN_FLOAT8 = 0x7F


def block_amax(x: Tensor) -> Tensor:
    """Largest magnitudes of the blocks of `x` [R, C]: float32 [ceil(R / 128), ceil(C / 128)]."""
    rows, cols = (-(-size // BLOCK) for size in x.shape)
    magnitudes = torch.nn.functional.pad(x.abs(), (0, cols * BLOCK - x.shape[1], 0, rows * BLOCK - x.shape[0]))
    amax = magnitudes.view(rows, BLOCK, cols, BLOCK).amax((1, 3)).float()
    return torch.where(amax.isnan(), torch.nan, amax)


def scales_of(amax: Tensor) -> Tensor:
    """What the quantised elements of blocks of these magnitudes are multiplied with, float32 of the same shape."""
    a = amax.clamp(min=SMALLEST_AMAX)
    return torch.where(amax.isfinite(), a / torch.full_like(a, MAX_FLOAT8), torch.nan)


def inverse_scales_of(amax: Tensor) -> Tensor:
    """What the elements of blocks of these magnitudes are multiplied with before rounding; NaN as in `scales_of`."""
    a = amax.clamp(min=SMALLEST_AMAX)
    return torch.where(amax.isfinite(), torch.full_like(a, MAX_FLOAT8) / a, torch.nan)


def quantize_elements(x: Tensor, inverse: Tensor) -> Tensor:
    """`x` in e4m3 after a multiplication with `inverse`, which has or broadcasts to its shape."""
    scaled = x.float() * inverse
    q = scaled.clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)
    q.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_FLOAT8)
    return q


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [R, C] and the scales of its blocks, float32 [ceil(R / 128), ceil(C / 128)], of `x` [R, C]."""
    amax = block_amax(x)
    return quantize_elements(x, per_element(inverse_scales_of(amax), x.shape)), scales_of(amax)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """float32 [R, C] of what `quantize_blocks` gives."""
    return q.float() * per_element(scales, q.shape)


def per_element(blocks: Tensor, shape: torch.Size, *, row_phase: int = 0, col_phase: int = 0) -> Tensor:
    """Values per block as values per element of a matrix of this shape, whose first element lies at these phases
    within the first block."""
    rows = torch.arange(row_phase, row_phase + shape[0], device=blocks.device) // BLOCK
    cols = torch.arange(col_phase, col_phase + shape[1], device=blocks.device) // BLOCK
    return blocks[rows[:, None], cols]
