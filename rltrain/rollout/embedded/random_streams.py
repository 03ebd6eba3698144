"""Random numbers that depend only on a sample's seed and the position in its response."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 23
"""A float32 holds (k + 1/2) / 2**23 exactly for every k below 2**23: never 0, never 1."""


def mix64(values: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (wrapping arithmetic, shifts made logical by masks)."""
    values = (values ^ _shift_right(values, 30)) * _MULTIPLIER_1
    values = (values ^ _shift_right(values, 27)) * _MULTIPLIER_2
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_streams(seeds: list[int], device: torch.device) -> Tensor:
    """[len(seeds)] int64: where each sample's sequence of random numbers starts."""
    signed = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return mix64(torch.tensor(signed, dtype=torch.int64, device=device))


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Float32 numbers in (0, 1), one per element: number `positions` of each stream."""
    bits = _shift_right(mix64(torch.add(streams, positions, alpha=_GOLDEN)), 64 - _UNIFORM_BITS)
    return (bits + 0.5) * 2.0**-_UNIFORM_BITS
