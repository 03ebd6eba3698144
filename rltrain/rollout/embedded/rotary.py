"""Rotary position embedding in the rotate-half convention of Hugging Face checkpoints."""

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each [tokens, 1, rotated elements of a head] fp32."""


class RotaryEmbedding:
    """Cosines and sines, times `magnitude`, of every position up to `num_positions`: no functions of weights."""

    def __init__(self, frequencies: Tensor, magnitude: float, num_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._cos = torch.cat([cos, cos], -1).to(device)
        self._signed_sin = torch.cat([-sin, sin], -1).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [tokens]."""
        return self._cos.index_select(0, positions)[:, None], self._signed_sin.index_select(0, positions)[:, None]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """`heads` [tokens, heads, head_dim], of whose elements the first are rotated, as many as `rotation` has: rolling by
    half swaps the halves, the sines carry the sign.

    In fp32, rounded once to the type of `heads`, as in training.
    """
    cos, signed_sin = rotation
    size = cos.shape[-1]
    wide = heads[..., :size].float()
    turned = (wide * cos).addcmul_(wide.roll(size // 2, -1), signed_sin).to(heads.dtype)
    return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], -1)
