"""Rotation of heads in packed sequences. A rank may have two slices of each sequence."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("transformer_engine.pytorch.absent"), name)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str,
    fused: bool,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Rotates `t` by `freqs` [positions, 1, 1, head_dim] in fp32.

    In format thd, `t` is [rows of this rank, heads, head_dim] and `cu_seqlens` are of whole sequences. In format sbhd
    it is [positions, 1, heads, head_dim].
    """
    assert fused and not interleaved and freqs.dtype == torch.float32
    if tensor_format == "sbhd":
        assert t.dim() == 4 and len(t) <= len(freqs) and cu_seqlens is None and cp_size == 1
        return _turned(t, freqs[: len(t)])
    assert tensor_format == "thd" and t.dim() == 3 and cu_seqlens is not None
    positions = []
    for length in cu_seqlens.diff().tolist():
        slices = torch.arange(length).chunk(2 * cp_size if cp_size > 1 else 1)
        positions += [slices[cp_rank], slices[-1 - cp_rank]] if cp_size > 1 else slices
    return _turned(t, freqs[torch.cat(positions)].flatten(1, 2))


def _turned(t: Tensor, angles: Tensor) -> Tensor:
    first, second = t.float().chunk(2, dim=-1)
    turned = t.float() * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return turned.to(t.dtype)
