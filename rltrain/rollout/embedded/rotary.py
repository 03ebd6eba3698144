"""Rotary position embedding in the rotate-half convention of Hugging Face checkpoints."""

import math

import torch
from torch import Tensor

from rltrain.reshard.families import RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each [tokens, 1, head_dim]."""


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[head_dim / 2] float32 angles per position; stretched by `scaling` if given."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    kept = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return torch.where(
        wavelengths > low_wavelength,
        frequencies / scaling.factor,
        torch.where(wavelengths < high_wavelength, frequencies, blended),
    )


class RotaryEmbedding:
    """Cosines and sines of every position up to `num_positions`: functions of the architecture, not of weights."""

    def __init__(self, frequencies: Tensor, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(device, dtype)
        self._signed_sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [tokens]."""
        return self._cos.index_select(0, positions)[:, None], self._signed_sin.index_select(0, positions)[:, None]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotated `heads` [tokens, heads, head_dim]: rolling by half swaps the halves, the sines carry the sign."""
    cos, signed_sin = rotation
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, -1), signed_sin)
