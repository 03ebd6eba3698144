"""Attention with keys and values of its own for each head, or for several heads together."""

from typing import Protocol

import torch
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import halves_of_pairs
from rltrain.rollout.embedded.head_norms import head_norms
from rltrain.rollout.embedded.kv_cache import AttentionShape, DecodeAttention, PrefillAttention
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters
from rltrain.rollout.embedded.residual import Norm, add_product
from rltrain.rollout.embedded.rotary import Rotation, rotate

Attention = DecodeAttention | PrefillAttention
_POST_NORMS = ("post_self_attn_layernorm.weight", "post_attention_layernorm.weight")
"""What families call a norm behind attention: the first that is there. The second is the MLP's elsewhere."""


class AttentionLayer(Protocol):
    """Attention of layer number `layer` on this rank."""

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        """Add what it makes of `hidden` [tokens, hidden] to that, in place; what is kept of the tokens is stored.

        Collective over: the engine's tensor-parallel group.
        """
        ...

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        """Only store what is kept of the tokens."""
        ...


class GroupedAttention:
    """Implements `AttentionLayer`: multi-head and grouped-query attention."""

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        self._group = group
        shape = self.shape(architecture, group.size)
        self._num_heads, self._num_rotated = shape.num_heads, shape.num_heads + shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._norm = Norm(parameters["input_layernorm.weight"], architecture, parameters.get("input_layernorm.bias"))
        self._qkv = parameters.matrix("self_attn.qkv_proj.weight")
        self._qkv_bias = parameters.get("self_attn.qkv_proj.bias")
        self._head_norms = head_norms(parameters, architecture, group)
        self._output = parameters.matrix("self_attn.o_proj.weight")
        self._output_bias = parameters.get("self_attn.o_proj.bias")
        self._sinks = parameters.get("self_attn.sinks")
        self._post_norm = None
        if architecture.post_norms:
            self._post_norm = Norm(parameters.first(*_POST_NORMS), architecture)
        self._rotates_pairs, self._is_gated = architecture.rotates_pairs, architecture.gated_attention

    @staticmethod
    def shape(architecture: Architecture, tp: int) -> AttentionShape:
        """On one of `tp` ranks."""
        num_kv_heads, head_dim = max(1, architecture.num_kv_heads // tp), architecture.head_dim
        return AttentionShape(
            architecture.num_heads // tp,
            num_kv_heads,
            head_dim,
            head_dim,
            architecture.score_scale,
            windows=architecture.windows,
            softcap=architecture.attention_softcap,
            sinks=architecture.attention_sinks,
        )

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        queries, keys, values, gate = self._project(hidden, rotation)
        attended = attention(layer, queries, keys, values, self._sinks)
        if gate is not None:
            attended = (attended * gate.reshape(attended.shape).float().sigmoid()).to(attended.dtype)
        add_product(hidden, attended, self._output, self._group, self._post_norm)
        if self._output_bias is not None:
            hidden.add_(self._output_bias)

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        _, keys, values, _ = self._project(hidden, rotation)
        attention.store(layer, keys, values)

    def _project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated queries [tokens, heads, head_dim] and keys, and values, both [tokens, kv_heads, head_dim]; and the
        gates of heads, where these have any."""
        fused, gate = self._qkv.product(self._norm(hidden), self._qkv_bias).view(len(hidden), -1, self._head_dim), None
        if self._is_gated:
            fused, gate = self._without_gates(fused)
        rotated = fused[:, : self._num_rotated]
        if self._head_norms is not None:
            rotated = self._head_norms(rotated)
        if self._rotates_pairs:
            rotated = halves_of_pairs(rotated, rotation[0].shape[-1])
        rotated = rotate(rotated, rotation)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], fused[:, self._num_rotated :], gate

    def _without_gates(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """(queries, keys and values; gates), of which each gate stands behind its query."""
        queries, rest = fused.split([2 * self._num_heads, fused.size(1) - 2 * self._num_heads], dim=1)
        queries, gate = queries.unflatten(1, (self._num_heads, 2)).unbind(2)
        return torch.cat([queries, rest], dim=1), gate
