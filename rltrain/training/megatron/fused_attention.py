"""Self-attention over packed sequences on CPUs, from the projection to the heads to that from them."""

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import halves_of_pairs
from rltrain.training.megatron.attention import GroupedSelfAttention, PackedSequences
from rltrain.training.megatron.fused import Gradients, TurnedHeads, takes_fused
from rltrain.training.megatron.norms import ProjectionNorm

LONGEST_BY_PRODUCTS = 64
"""Tokens up to which batched products with a matrix of scores take 0.6 of the time of torch's kernel, and scores the
memory of queries a few times."""


class PaddedRows(NamedTuple):
    """Which rows of `head_dim` elements stand where, when heads of tokens become heads of padded sequences."""

    padding: Tensor
    """[sequences * heads * width] the row of the heads [tokens, heads] for each row of [sequences, heads, width]."""
    unpadding: Tensor
    """The other way round: [tokens * heads]."""

    @classmethod
    def of(cls, packed: PackedSequences, num_heads: int) -> "PaddedRows":
        return packed.once(f"rows of {num_heads} heads", lambda: cls._made(packed, num_heads))

    @classmethod
    def _made(cls, packed: PackedSequences, num_heads: int) -> "PaddedRows":
        ((num_sequences, width),) = packed.batches
        heads = torch.arange(num_heads, device=packed.pad_index.device)
        tokens = packed.pad_index.view(num_sequences, 1, width)
        sequence = packed.unpad_index // width
        first_slot = sequence * (num_heads - 1) * width + packed.unpad_index
        return cls(
            padding=(tokens * num_heads + heads[:, None]).flatten(),
            unpadding=(first_slot[:, None] + heads * width).flatten(),
        )


class ShortAttention(torch.autograd.Function):
    """Causal attention within each packed sequence, by batched products over sequences of nearly one length.

    `heads` [tokens, groups, heads of a group, head_dim]: a group's queries, then its keys, then its values. -> [tokens,
    1, all queries * head_dim].
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, packed: PackedSequences, scale: float, window: int | None) -> Tensor:
        num_tokens, num_groups, per_group, head_dim = heads.shape
        ((num_sequences, width),) = packed.batches
        num_queries = per_group - 2
        rows = PaddedRows.of(packed, num_groups * per_group)
        rows_of_queries = PaddedRows.of(packed, num_groups * num_queries)
        padded = heads.reshape(-1, head_dim).index_select(0, rows.padding)
        padded = padded.view(num_sequences * num_groups, per_group * width, head_dim)
        queries, keys, values = padded.split([num_queries * width, width, width], dim=1)
        # Padding needs no mask: it comes after the real tokens, which causality keeps from attending to it.
        unseen = torch.full((width, width), -torch.inf, dtype=heads.dtype).triu_(1)
        if window is not None and window < width:
            unseen += torch.full_like(unseen, -torch.inf).tril_(-window)
        scores = torch.baddbmm(unseen.repeat(num_queries, 1), queries, keys.mT, alpha=scale)
        shares = torch.softmax(scores, dim=-1)
        attended = torch.bmm(shares, values).view(-1, head_dim)
        ctx.save_for_backward(padded, shares, *rows, rows_of_queries.unpadding)
        ctx.shape, ctx.scale = heads.shape, scale
        return attended.index_select(0, rows_of_queries.unpadding).view(num_tokens, 1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        padded, shares, _, unpadding, unpadding_of_queries = ctx.saved_tensors
        width, head_dim = shares.size(-1), padded.size(-1)
        queries, keys, values = padded.split([shares.size(1), width, width], dim=1)
        of_attended = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        rows = gradients[0].reshape(-1, head_dim)
        of_attended.view(-1, head_dim).index_copy_(0, unpadding_of_queries, rows)
        of_shares = torch.bmm(of_attended, values.mT)
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
        of_queries = torch.bmm(of_scores, keys).mul_(ctx.scale)
        of_keys = torch.bmm(of_scores.mT, queries).mul_(ctx.scale)
        of_values = torch.bmm(shares.mT, of_attended)
        of_padded = torch.cat([of_queries, of_keys, of_values], dim=1)
        of_heads = of_padded.view(-1, head_dim).index_select(0, unpadding).view(ctx.shape)
        return of_heads, None, None, None


class OwnRotary(NamedTuple):
    """What of the model's rotary angles a layer takes: those of base number `base`, for the first `size` elements of
    its heads, which are multiplied by `magnitude` besides; with `pairs` neighbours are rotated together."""

    size: int
    base: int = 0
    magnitude: float = 1.0
    pairs: bool = False

    def angles(self, of_model: Tensor) -> Tensor:
        """[tokens, 1, 1, size] of the angles of all bases."""
        return of_model.narrow(-1, self.base * self.size, self.size)


class FusedSelfAttention(GroupedSelfAttention):
    """Megatron's self-attention, on CPUs in full precision as few operations on all heads at once."""

    def __init__(self, *arguments: Any, rotary: OwnRotary, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rotary = rotary
        self.norms_projections = isinstance(self.q_layernorm, ProjectionNorm)
        if self.norms_projections:
            self.q_layernorm.tp_group = self.k_layernorm.tp_group = self.tp_group

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rotary_pos_emb = self.rotary.angles(rotary_pos_emb)
        whole_groups = self.config.num_query_groups >= self.world_size
        whole_sequences = self.config.context_parallel_size == 1
        head_by_head = not self.norms_projections
        takes_one_by_one = not head_by_head or self.config.attention_output_gate
        if not (takes_fused(hidden_states) and whole_groups and whole_sequences) or takes_one_by_one:
            settings |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            unfused: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, **settings)
            return unfused
        projected, _ = self.linear_qkv(hidden_states)
        heads = self._turned(projected, rotary_pos_emb, packed_seq_params)
        projection: tuple[Tensor, Tensor | None] = self.linear_proj(self._attended(heads, packed_seq_params))
        return projection

    def get_query_key_value_tensors(self, *arguments: Any, **settings: Any) -> Any:
        """As GroupedSelfAttention has them, such that Megatron's rotation, of halves and by angles alone, does."""
        query, key, value, *gate = super().get_query_key_value_tensors(*arguments, **settings)
        if self.rotary.pairs:
            query, key = (halves_of_pairs(heads, self.rotary.size) for heads in (query, key))
        if self.rotary.magnitude != 1:
            size = self.rotary.size
            query, key = (
                torch.cat([heads[..., :size] * self.rotary.magnitude, heads[..., size:]], dim=-1)
                for heads in (query, key)
            )
        return query, key, value, *gate

    def _turned(self, projected: Tensor, angles: Tensor, packed: PackedSequences) -> Tensor:
        """[tokens, groups, heads of a group, head_dim]."""
        head_dim = self.hidden_size_per_attention_head
        heads = projected.view(len(projected), self.num_query_groups_per_partition, -1, head_dim)
        if self.rotary.pairs:
            heads = torch.cat([halves_of_pairs(heads[:, :, :-1], self.rotary.size), heads[:, :, -1:]], dim=2)
        weight, eps = None, 0.0
        if self.config.qk_layernorm:
            of_queries = self.q_layernorm.gain().expand(heads.size(2) - 2, head_dim)
            of_keys = self.k_layernorm.gain()[None]
            weight, eps = torch.cat([of_queries, of_keys, torch.ones_like(of_keys)]), self.q_layernorm.eps
        magnitude = self.rotary.magnitude
        cos, sin = packed.once(f"rotation {self.rotary.base}", lambda: rotation(angles, heads, magnitude))
        turned: Tensor = TurnedHeads.apply(heads, weight, cos, sin, eps, angles.size(-1))
        return turned

    def _attended(self, heads: Tensor, packed: PackedSequences) -> Tensor:
        """[tokens, 1, queries * head_dim]."""
        core = self.core_attention
        scale = core.softmax_scale or heads.size(-1) ** -0.5

        def attend(heads: Tensor) -> Tensor:
            if packed.longest <= LONGEST_BY_PRODUCTS and not core.takes_scores:
                attended: Tensor = ShortAttention.apply(heads, packed, scale, core.window)
                return attended
            query, key, value = heads.split([heads.size(2) - 2, 1, 1], dim=2)
            query, key, value = (part.flatten(1, 2)[:, None] for part in (query, key, value))
            return core(query, key, value, None, packed_seq_params=packed)

        if self.checkpoint_core_attention and self.training:
            return checkpoint(attend, False, heads)
        return attend(heads)


def rotation(angles: Tensor, heads: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """As TurnedHeads takes them for these heads, from the angles [tokens, 1, 1, rotated elements of a head]."""
    size, unturned = angles.size(-1), (0, heads.size(-1) - angles.size(-1))
    cos = torch.nn.functional.pad(angles.cos() * magnitude, unturned, value=1.0)
    sin = torch.nn.functional.pad(angles.sin() * magnitude, unturned)
    cos, sin = (part.to(heads.dtype).expand_as(heads).contiguous() for part in (cos, sin))
    sin[..., : size // 2].neg_()
    cos[:, :, -1], sin[:, :, -1] = 1, 0
    return cos, sin
