"""Rotary position embedding in the rotate-half convention of Hugging Face checkpoints."""

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each [tokens, 1, head_dim] fp32."""


class RotaryEmbedding:
    """Cosines and sines of every position up to `num_positions`: functions of the architecture, not of weights."""

    def __init__(self, frequencies: Tensor, num_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(device)
        self._signed_sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [tokens]."""
        return self._cos.index_select(0, positions)[:, None], self._signed_sin.index_select(0, positions)[:, None]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotated `heads` [tokens, heads, head_dim]: rolling by half swaps the halves, the sines carry the sign.

    In fp32, rounded once to the type of `heads`, as in training.
    """
    cos, signed_sin = rotation
    wide = heads.float()
    return (wide * cos).addcmul_(wide.roll(heads.shape[-1] // 2, -1), signed_sin).to(heads.dtype)
