"""fp32 values kept in bf16 whose mean error is zero, without a random generator."""

import torch
from torch import Tensor

DROPPED_BITS = 16
"""Of fp32, that bf16 does not have."""
LOW_BITS = (1 << DROPPED_BITS) - 1
STEP_FACTOR, VALUE_FACTOR, MIX_FACTORS = 0x9E3779B1, 0x27D4EB2F, (0x2C1B3C6D, 0x297A2D39)
"""Odd 32-bit numbers with about as many ones as zeros."""


def keep_rounded(kept: Tensor, values: Tensor, weights: Tensor, step: int, salt: int) -> None:
    """Write fp32 `values` to `kept`, bf16, each to one of its two neighbours, the nearer the likelier.

    To the nearest alone, a moment that decays by less than half of bf16's spacing (2**-9) in a step would stay as it
    is: the second one with a beta2 above 0.998. What decides is a hash of the value, of the weight it belongs to, of
    `step` and of `salt`, all fp32 of one shape: so a run repeats and resumes bit for bit, in any layout that gives it
    these numbers. `weights` may be on the way to anything; they only tell elements apart.
    """
    bits = values.view(torch.int32)
    noise = bits * _signed(VALUE_FACTOR)
    noise ^= weights.view(torch.int32)
    noise += _signed((step * STEP_FACTOR + salt) & 0xFFFFFFFF)
    for factor in MIX_FACTORS:
        noise ^= noise >> DROPPED_BITS - 1
        noise *= _signed(factor)
    noise >>= DROPPED_BITS
    noise &= LOW_BITS
    noise += bits
    noise &= ~LOW_BITS
    kept.copy_(noise.view(torch.float32))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
