"""Random numbers that depend only on a sample's seed, the position in its response and a counter."""

import torch
from torch import Tensor

POSITION_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio's fraction of 2**64, by which SplitMix64 advances."""
COUNTER_STEP = 0x91E10DA5C79E7B1D - (1 << 64)
"""The square of the plastic ratio's fraction of 2**64. No two (position, counter) pairs of a response coincide: below
2**20 positions, counters would have to be 2**42 apart."""
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
UNIFORM_BITS = (1 << 63 | 1) - (1 << 64)
"""Set in a mixed number, they leave an odd negative one between -2**63 and -1."""
UNIFORM_SCALE = 2.0**-63 * (1 - 2.0**-24)
"""Of such a number, as float32, this makes one below 0 and not below -1 + 2**-24."""
NO_STREAM = -(1 << 63)
"""Marks a row that is drawn greedily. A seed's own stream begins there with a probability of 2**-64."""


def mix64(values: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (wrapping arithmetic, shifts made logical by masks)."""
    values = _multiplied(values)
    return values ^ _shift_right(values, 31)


def _multiplied(values: Tensor) -> Tensor:
    """The finaliser but for its last step, which leaves the upper 31 bits as they are."""
    values = (values ^ _shift_right(values, 30)).mul_(MULTIPLIER_1)
    return values.bitwise_xor_(_shift_right(values, 27)).mul_(MULTIPLIER_2)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_streams(seeds: list[int], device: torch.device) -> Tensor:
    """[len(seeds)] int64: where each sample's sequence of random numbers starts."""
    signed = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return mix64(torch.tensor(signed, dtype=torch.int64, device=device))


def log_uniforms(streams: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Returns the logarithms of uniform numbers between 0 and 1 as float32, each finite and below 0, one per element.

    All arguments are int64 and broadcast. The uniform numbers are equal on every device; the logarithm may round
    otherwise. It keeps its precision near 0, where large uniform numbers lie.
    """
    state = torch.add(streams, positions, alpha=POSITION_STEP) + counters * COUNTER_STEP
    return _multiplied(state).bitwise_or_(UNIFORM_BITS).float().mul_(UNIFORM_SCALE).log1p_()
