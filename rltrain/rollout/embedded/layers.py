"""Attention layers, norms, rotary embeddings and the residual stream of the embedded engine."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import halves_of_pairs
from rltrain.models.delta_rule import DeltaHeads
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.rollout.embedded.kv_cache import AttentionShape, DecodeAttention, PrefillAttention
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix, TensorParallel

# The residual stream [tokens, hidden]: reading and adding.


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of `hidden` times `weight`, rounded once to the weight's dtype even if `hidden` is wider."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(weight.dtype)


class Norm:
    """A norm with a weight read on every call, plus the family's offset. With a bias it is a layer norm, else an RMS
    norm."""

    def __init__(self, weight: Tensor, architecture: Architecture, bias: Tensor | None = None) -> None:
        self._weight, self._eps, self._offset = weight, architecture.norm_eps, architecture.norm_offset
        self._bias = bias

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._bias is not None:
            gain, bias = self._weight.float() + self._offset, self._bias.float()
            return F.layer_norm(hidden.float(), gain.shape, gain, bias, self._eps).to(self._weight.dtype)
        if not self._offset:
            return normed(hidden, self._weight, self._eps)
        gain = self._weight.float() + self._offset
        return F.rms_norm(hidden.float(), gain.shape, gain, self._eps).to(self._weight.dtype)


def add_product(hidden: Tensor, inner: Tensor, matrix: Matrix, group: TensorParallel, norm: Norm | None = None) -> None:
    """Computes hidden += inner @ matrix.T, with `inner` and `matrix` split by columns over `group`.

    The product passes through `norm` first if there is one. Collective over: `group`.
    """
    if norm is not None:
        hidden.add_(norm(group.all_reduce(matrix.product(inner))))
    elif group.size == 1 and hidden.dtype == inner.dtype:
        matrix.add_product(hidden, inner)
    else:
        hidden.add_(group.all_reduce(matrix.product(inner)))


# Norms of queries and keys, per head or over all heads of a token.

HeadNorms = Callable[[Tensor], Tensor]
"""A function on this rank's query heads followed by its key heads, shape [tokens, heads, head_dim].

It rounds once, like the trainer. Collective over: the engine's tensor-parallel group.
"""


def head_norms(parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> HeadNorms | None:
    """Returns the norms of a layer's queries and keys, or None if it has none."""
    weights = parameters.get("self_attn.q_norm.weight"), parameters.get("self_attn.k_norm.weight")
    if weights[0] is None or weights[1] is None:
        return None
    if architecture.norms_projections:
        return _OfProjections(weights[0], weights[1], architecture, group)
    return _OfHeads(weights[0], weights[1], architecture, group)


class _OfHeads:
    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self._queries, self._keys = queries, keys
        self._num_queries = architecture.num_heads // group.size
        self._eps, self._offset = architecture.norm_eps, architecture.norm_offset

    def __call__(self, heads: Tensor) -> Tensor:
        wide = F.rms_norm(heads.float(), heads.shape[-1:], None, self._eps)
        wide[:, : self._num_queries].mul_(self._queries + self._offset)
        wide[:, self._num_queries :].mul_(self._keys + self._offset)
        return wide.to(heads.dtype)


class _OfProjections:
    """Norms over all heads of a token. Every rank has the whole weights. Several ranks may have the same key head."""

    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._eps, self._weights = group, architecture.norm_eps, (queries, keys)
        totals = architecture.num_heads, architecture.num_kv_heads
        self._firsts = [group.rank * total // group.size * architecture.head_dim for total in totals]
        self._counts = [max(1, total // group.size) for total in totals]

    def __call__(self, heads: Tensor) -> Tensor:
        parts = [part.flatten(1).float() for part in heads.split(self._counts, 1)]
        means = self._group.all_reduce(torch.stack([part.square().mean(1) for part in parts])) / self._group.size
        normed = []
        for part, mean, weight, first in zip(parts, means, self._weights, self._firsts, strict=True):
            gain = weight[first : first + part.shape[1]]
            normed.append(part * torch.rsqrt(mean + self._eps)[:, None] * gain)
        return torch.cat(normed, 1).view(heads.shape).to(heads.dtype)


# Rotary position embedding in the rotate-half convention of Hugging Face checkpoints.


Rotation = tuple[Tensor, Tensor]
"""(cosines, signed sines), each fp32, shape [tokens, 1, rotated elements of a head]."""


class RotaryEmbedding:
    """Cosines and sines of every position below `num_positions`, times `magnitude`. They do not depend on weights.

    With `axes` [frequencies] a token has three positions, and each frequency rotates by the one of its axis.
    """

    def __init__(
        self,
        frequencies: Tensor,
        magnitude: float,
        num_positions: int,
        device: torch.device,
        axes: Tensor | None = None,
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._cos = torch.cat([cos, cos], -1).to(device)
        self._signed_sin = torch.cat([-sin, sin], -1).to(device)
        self._axes = None if axes is None else torch.cat([axes, axes]).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """Returns the rotation for `positions` [tokens], or [3, tokens] with one row for each axis."""
        if positions.dim() > 1:
            assert self._axes is not None, "only models with images have three positions of a token"
            of_frequencies = positions.index_select(0, self._axes).t()
            return self._cos.gather(0, of_frequencies)[:, None], self._signed_sin.gather(0, of_frequencies)[:, None]
        return self._cos.index_select(0, positions)[:, None], self._signed_sin.index_select(0, positions)[:, None]


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first elements of `heads` [tokens, heads, head_dim], as many as `rotation` has.

    Rolling by half the size swaps the halves, and the sines carry the sign. Computed in fp32 and rounded once to the
    dtype of `heads`, as in training.
    """
    cos, signed_sin = rotation
    size = cos.shape[-1]
    wide = heads[..., :size].float()
    turned = (wide * cos).addcmul_(wide.roll(size // 2, -1), signed_sin).to(heads.dtype)
    return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], -1)


# Attention with separate keys and values for each head or group of heads.

Attention = DecodeAttention | PrefillAttention
_POST_NORMS = ("post_self_attn_layernorm.weight", "post_attention_layernorm.weight")
"""Names of a norm after attention. The first existing one is used. In other families the second name is the MLP's
norm."""


class AttentionLayer(Protocol):
    """The attention of one layer on this rank. `layer` counts the layers of its kind."""

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        """Adds the output for `hidden` [tokens, hidden] to it in place. Also stores the tokens' cached data.

        Collective over: the engine's tensor-parallel group.
        """
        ...

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        """Only stores the tokens' cached data."""
        ...


class GroupedAttention:
    """Implements `AttentionLayer` for multi-head and grouped-query attention."""

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
        """Returns the attention shape on one of `tp` ranks."""
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
        """Returns (queries, keys, values, gates). Queries and keys are rotated. The gates are None without gated
        attention.

        Queries have shape [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim].
        """
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
        """Splits off the gates. Returns (queries, keys and values; gates). In `fused` each gate follows its query."""
        queries, rest = fused.split([2 * self._num_heads, fused.size(1) - 2 * self._num_heads], dim=1)
        queries, gate = queries.unflatten(1, (self._num_heads, 2)).unbind(2)
        return torch.cat([queries, rest], dim=1), gate


# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). The cache holds latents.


class LatentAttention:
    """Implements `AttentionLayer` for multi-head latent attention.

    The cache holds a latent and the rotated part of the key for each token, [kv_rank + rope]. They are shared by all
    heads and whole on every rank.

    If tokens attend only to each other, each head's keys and values are computed from the latents. If they attend to
    cached tokens, the key and value matrices are applied to queries and outputs instead. Queries then have the width of
    the cached vectors, attention returns latents, and each head computes its value from them.
    """

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        mla = architecture.mla
        assert mla is not None
        self._group, self._eps, self._mla = group, architecture.norm_eps, mla
        self._num_heads = architecture.num_heads // group.size
        self._norm = parameters["input_layernorm.weight"]
        self._latent_norm = parameters["self_attn.kv_a_layernorm.weight"]
        self._from_latent = parameters.matrix("self_attn.kv_b_proj.weight")
        self._output = parameters.matrix("self_attn.o_proj.weight")
        self._query_norm: Tensor | None = None
        if mla.q_rank is None:
            self._to_latents = parameters.matrix("self_attn.kv_a_proj_with_mqa.weight")
            self._queries = parameters.matrix("self_attn.q_proj.weight")
        else:
            self._to_latents = parameters.matrix("self_attn.fused_qkv_a_proj_with_mqa.weight")
            self._query_norm = parameters["self_attn.q_a_layernorm.weight"]
            self._queries = parameters.matrix("self_attn.q_b_proj.weight")

    @staticmethod
    def shape(architecture: Architecture, tp: int) -> AttentionShape:
        """Returns the attention shape on one of `tp` ranks."""
        mla = architecture.mla
        assert mla is not None
        kept = mla.kv_rank + mla.rope_head_dim
        return AttentionShape(architecture.num_heads // tp, 1, kept, mla.kv_rank, architecture.score_scale, latent=True)

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        inner = normed(hidden, self._norm, self._eps)
        kept, query_input = self._kept(inner, rotation)
        queries = self._queries.product(query_input).view(len(hidden), self._num_heads, -1)
        plain, rotated = queries.split([self._mla.plain_head_dim, self._mla.rope_head_dim], -1)
        rotated = rotate(halves_of_pairs(rotated), rotation)
        if isinstance(attention, PrefillAttention) and not attention.reads_cache:
            attention.store(layer, kept, kept)
            attended = self._attend_to_each_other(plain, rotated, kept, attention)
        else:
            attended = self._attend_to_cached(layer, plain, rotated, kept, attention)
        add_product(hidden, attended, self._output, self._group)

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        kept, _ = self._kept(normed(hidden, self._norm, self._eps), rotation)
        attention.store(layer, kept, kept)

    def _kept(self, inner: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns (cached data of the tokens [tokens, 1, kv_rank + rope], input of the query projection)."""
        mla = self._mla
        latents = self._to_latents.product(inner)
        if self._query_norm is not None:
            query_latent, latents = latents.split([len(self._query_norm), mla.kv_rank + mla.rope_head_dim], -1)
            inner = normed(query_latent, self._query_norm, LATENT_NORM_EPS)
        latent, key = latents[:, None].split([mla.kv_rank, mla.rope_head_dim], -1)
        key = rotate(halves_of_pairs(key), rotation)
        return torch.cat([normed(latent, self._latent_norm, LATENT_NORM_EPS), key], -1), inner

    def _attend_to_each_other(
        self, plain: Tensor, rotated: Tensor, kept: Tensor, attention: PrefillAttention
    ) -> Tensor:
        """Attends with explicit keys and values of every head. Returns [tokens, heads * value_head_dim]."""
        mla = self._mla
        latent, key = kept.split([mla.kv_rank, mla.rope_head_dim], -1)
        made = self._from_latent.product(latent).view(len(kept), self._num_heads, -1)
        keys, values = made.split([mla.plain_head_dim, mla.value_head_dim], -1)
        keys = torch.cat([keys, key.expand(-1, self._num_heads, -1)], -1)
        return attention.among(torch.cat([plain, rotated], -1), keys, values)

    def _attend_to_cached(
        self, layer: int, plain: Tensor, rotated: Tensor, kept: Tensor, attention: Attention
    ) -> Tensor:
        """Attends to cached latents. Returns [tokens, heads * value_head_dim]."""
        mla, adapter = self._mla, self._from_latent.adapter
        of_keys, of_values = self._by_head(self._from_latent.read())
        queries = plain.transpose(0, 1)
        wide = torch.bmm(queries, of_keys)
        if adapter is not None:
            a, b = adapter.factors()
            b_of_keys, b_of_values = self._by_head(b)
            wide += torch.bmm(queries, b_of_keys) * adapter.scale @ a
        latents = attention(layer, torch.cat([wide.transpose(0, 1), rotated], -1), kept, kept[..., : mla.kv_rank])
        by_head = latents.view(len(kept), self._num_heads, mla.kv_rank).transpose(0, 1)
        values = torch.bmm(by_head, of_values.transpose(1, 2))
        if adapter is not None:
            values += torch.bmm(by_head @ a.t() * adapter.scale, b_of_values.transpose(1, 2))
        return values.transpose(0, 1).reshape(len(kept), -1)

    def _by_head(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the matrices for keys and for values, each of shape [heads, rows of a head, columns]."""
        by_head = matrix.unflatten(0, (self._num_heads, -1))
        of_keys, of_values = by_head.split([self._mla.plain_head_dim, self._mla.value_head_dim], 1)
        return of_keys, of_values


# Gated delta nets in place of attention.


class DeltaLayer:
    """Implements `AttentionLayer` for a rank's share of the heads.

    It caches a state per sample and nothing per token.
    """

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        assert architecture.delta is not None
        self._group = group
        self._norm = Norm(parameters["input_layernorm.weight"], architecture)
        self._projection = parameters.matrix("linear_attn.in_proj.weight")
        self._heads = DeltaHeads(
            architecture.delta.shared_by(group.size),
            convolution=parameters["linear_attn.conv1d.weight"],
            log_rate=parameters["linear_attn.A_log"],
            bias=parameters["linear_attn.dt_bias"],
            norm=parameters["linear_attn.norm.weight"],
            eps=architecture.norm_eps,
        )
        self._output = parameters.matrix("linear_attn.out_proj.weight")

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        add_product(hidden, self._made(layer, hidden, attention), self._output, self._group)

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        self._made(layer, hidden, attention)

    def _made(self, layer: int, hidden: Tensor, attention: Attention) -> Tensor:
        assert attention.states is not None, "the cache of this model must keep states"
        return attention.states.run(layer, self._heads, self._projection.product(self._norm(hidden)))
