"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), of which latents are kept."""

import torch
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import halves_of_pairs
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.rollout.embedded.attention_layer import Attention
from rltrain.rollout.embedded.kv_cache import AttentionShape, PrefillAttention
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters
from rltrain.rollout.embedded.residual import add_product, normed
from rltrain.rollout.embedded.rotary import Rotation, rotate


class LatentAttention:
    """Implements `AttentionLayer`. Of a token a latent and the rotated part of its key are kept, [kv_rank + rope], once
    for all heads and whole on every rank.

    Where tokens attend to each other alone, each head's keys and values are made from the latents. Where they attend to
    what is kept, the matrices that would make them are put on the other side of the products: a query becomes as wide
    as what is kept, and what is attended to is a latent, of which each head makes its value afterwards.
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
        """On one of `tp` ranks."""
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
            attended = self._among(plain, rotated, kept, attention)
        else:
            attended = self._to_kept(layer, plain, rotated, kept, attention)
        add_product(hidden, attended, self._output, self._group)

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        kept, _ = self._kept(normed(hidden, self._norm, self._eps), rotation)
        attention.store(layer, kept, kept)

    def _kept(self, inner: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """What is kept of the tokens [tokens, 1, kv_rank + rope], and what queries are made from."""
        mla = self._mla
        latents = self._to_latents.product(inner)
        if self._query_norm is not None:
            query_latent, latents = latents.split([len(self._query_norm), mla.kv_rank + mla.rope_head_dim], -1)
            inner = normed(query_latent, self._query_norm, LATENT_NORM_EPS)
        latent, key = latents[:, None].split([mla.kv_rank, mla.rope_head_dim], -1)
        key = rotate(halves_of_pairs(key), rotation)
        return torch.cat([normed(latent, self._latent_norm, LATENT_NORM_EPS), key], -1), inner

    def _among(self, plain: Tensor, rotated: Tensor, kept: Tensor, attention: PrefillAttention) -> Tensor:
        """[tokens, heads * value_head_dim], by keys and values of every head."""
        mla = self._mla
        latent, key = kept.split([mla.kv_rank, mla.rope_head_dim], -1)
        made = self._from_latent.product(latent).view(len(kept), self._num_heads, -1)
        keys, values = made.split([mla.plain_head_dim, mla.value_head_dim], -1)
        keys = torch.cat([keys, key.expand(-1, self._num_heads, -1)], -1)
        return attention.among(torch.cat([plain, rotated], -1), keys, values)

    def _to_kept(self, layer: int, plain: Tensor, rotated: Tensor, kept: Tensor, attention: Attention) -> Tensor:
        """[tokens, heads * value_head_dim], over latents."""
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
        """[heads, rows of a head, columns] of what makes keys, and of what makes values."""
        by_head = matrix.unflatten(0, (self._num_heads, -1))
        of_keys, of_values = by_head.split([self._mla.plain_head_dim, self._mla.value_head_dim], 1)
        return of_keys, of_values
