"""Rotary frequencies, which training and engines must compute alike. Apart from its siblings because it loads torch."""

import math

import torch
from torch import Tensor

from rltrain.models.architecture import Architecture
from rltrain.models.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)


def inverse_frequencies(architecture: Architecture, *, sliding: bool = False) -> Tensor:
    """[rotated elements of a head / 2] fp32 angles per position, scaled as the model's are; with `sliding` those of
    layers with a window, which are not scaled where they have a base of their own."""
    if sliding and architecture.sliding_rope_theta is not None:
        return _scaled(None, architecture.sliding_rope_theta, architecture.rotated_size)
    return _scaled(architecture.rope_scaling, architecture.rope_theta, architecture.rotated_size)


def _scaled(scaling: Scaling | None, theta: float, rotated: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / theta**exponents
    match scaling:
        case None | DynamicScaling():
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case LongRopeScaling():
            return 1.0 / (torch.tensor(scaling.divisors) * theta**exponents)
        case YarnScaling():
            kept = _kept_by_yarn(scaling, theta, rotated)
        case RopeScaling():
            kept = _kept_by_llama3(scaling, frequencies)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def halves_of_pairs(heads: Tensor, size: int | None = None) -> Tensor:
    """Elements 0, 2, 4, ... of the first `size` (None: all) of `heads` [..., head_dim], then 1, 3, 5, ... of them, then
    the rest: some checkpoints have those side by side that are rotated together. Of queries and of keys alike, this
    changes no score."""
    size = heads.size(-1) if size is None else size
    halves = heads[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if size == heads.size(-1) else torch.cat([halves, heads[..., size:]], dim=-1)


def _kept_by_llama3(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """[rotated / 2] how much of each frequency stays: all of wavelengths below original_max_positions /
    high_freq_factor, nothing of those above original_max_positions / low_freq_factor, a linear part of those
    between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0, 1)


def _kept_by_yarn(scaling: YarnScaling, theta: float, rotated: int) -> Tensor:
    """[rotated / 2] how much of each frequency stays: all of those that turn more than `beta_fast` times in the
    original context, nothing of those that turn less than `beta_slow` times, a linear part of those between."""

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rotated - 1)
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
