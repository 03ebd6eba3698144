"""Rotary frequencies, which training and engines must compute alike. Apart from its siblings because it loads torch."""

import math

import torch
from torch import Tensor

from rltrain.reshard.families.architecture import Architecture, YarnScaling


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """[head_dim / 2] fp32 angles per position, with Llama 3's scaling where it applies.

    Llama 3's scaling keeps wavelengths below original_max_positions / high_freq_factor, stretches those above
    original_max_positions / low_freq_factor by `factor`, and interpolates in between.
    """
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        raise NotImplementedError("YaRN's rotary frequencies are not computed here: no dense family uses them")
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
