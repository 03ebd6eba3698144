"""Rotary frequencies, which training and engines must compute alike. Apart from its siblings because it loads torch."""

import math

import torch
from torch import Tensor

from rltrain.models.architecture import Architecture
from rltrain.models.rope_scaling import LinearScaling, LongRopeScaling, YarnScaling


def inverse_frequencies(architecture: Architecture, *, sliding: bool = False) -> Tensor:
    """[rotated elements of a head / 2] fp32 angles per position, scaled as the model's are; with `sliding` those of
    layers with a window, which are not scaled where they have a base of their own.

    Llama 3's scaling keeps wavelengths below original_max_positions / high_freq_factor, stretches those above
    original_max_positions / low_freq_factor by `factor`, and interpolates in between.
    """
    rotated, scaling, theta = architecture.rotated_size, architecture.rope_scaling, architecture.rope_theta
    if sliding and architecture.sliding_rope_theta is not None:
        theta, scaling = architecture.sliding_rope_theta, None
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(scaling.divisors) * theta**exponents)
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        kept = _kept_by_yarn(scaling, theta, rotated)
    else:
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotation_magnitude(architecture: Architecture) -> float:
    """What the rotated elements of queries and of keys are multiplied by: 1 but with YaRN and LongRoPE."""
    scaling = architecture.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        return scaling.magnitude
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if not (scaling.mscale and scaling.mscale_all_dim):
        return _magnitude(scaling.factor, 1.0)
    return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)


def halves_of_pairs(heads: Tensor, size: int | None = None) -> Tensor:
    """Elements 0, 2, 4, ... of the first `size` (None: all) of `heads` [..., head_dim], then 1, 3, 5, ... of them, then
    the rest: some checkpoints have those side by side that are rotated together. Of queries and of keys alike, this
    changes no score."""
    size = heads.size(-1) if size is None else size
    halves = heads[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if size == heads.size(-1) else torch.cat([halves, heads[..., size:]], dim=-1)


def score_scale(architecture: Architecture) -> float:
    """What attention multiplies scores by: 1 / sqrt(head_dim) or what the model has instead, with YaRN times the square
    of its mscale_all_dim's."""
    if architecture.attention_scale is not None:
        return architecture.attention_scale
    scaling, scale = architecture.rope_scaling, architecture.head_dim**-0.5
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


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
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
