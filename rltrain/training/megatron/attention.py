"""Attention over packed sequences without Transformer Engine, and tensor parallelism above the number of KV heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rltrain.models.attention import attend, attend_packed, attends_packed, sees

# Sequences share a padded batch while the shortest is at least this fraction of the longest: attention over padding
# costs up to the square of the inverse, a batch of its own costs a handful of kernel launches.
SHORTEST_FRACTION = 0.6
SHORT_TOKENS = 128  # below this width launches cost more than padding, whatever the fraction

Derived = TypeVar("Derived")


@dataclass
class PackedSequences(PackedSeqParams):
    """Where each packed sequence lies, for modules that pad sequences into batches.

    `qkv_format` is deliberately not "thd": Megatron then keeps its plain rotary embedding, which takes one row per
    token here, in place of one that splits the tokens by sequence in every layer.
    """

    positions: Tensor = field(kw_only=True)
    """[tokens] position of each token in its sequence."""
    pad_index: Tensor = field(kw_only=True)
    """[slots] the token that fills each slot of the padded batches; a sequence's last token fills its padding."""
    unpad_index: Tensor = field(kw_only=True)
    """[tokens] slot of each token."""
    batches: tuple[tuple[int, int], ...] = field(kw_only=True)
    """(sequences, width) of each padded batch; their slots follow each other."""
    boundaries: Tensor = field(kw_only=True)
    """[sequences + 1] int32: where each sequence starts, and the last one ends."""
    longest: int = field(kw_only=True)
    """Tokens of the longest sequence."""
    derived: dict[str, Any] = field(kw_only=True, default_factory=dict)
    """What `once` has made."""

    def once(self, name: str, make: Callable[[], Derived]) -> Derived:
        """What `make` gives, the same for all layers of the micro-batch."""
        if name not in self.derived:
            self.derived[name] = make()
        derived: Derived = self.derived[name]
        return derived


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Padded batches of sequences of similar length, for sequences packed in the order of `lengths`."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
    pad_parts, slot_of_start, batches, num_slots = [], torch.empty_like(sizes), [], 0
    for members in similar_lengths(sizes):
        width = int(sizes[members].max())
        slot_of_start[members] = num_slots + width * torch.arange(len(members))
        within = torch.arange(width).minimum(sizes[members, None] - 1)
        pad_parts.append((starts[members, None] + within).flatten())
        batches.append((len(members), width))
        num_slots += len(members) * width
    return PackedSequences(
        positions=positions.to(device),
        pad_index=torch.cat(pad_parts).to(device),
        unpad_index=(torch.repeat_interleave(slot_of_start, sizes) + positions).to(device),
        batches=tuple(batches),
        boundaries=_boundaries(lengths, device),
        longest=max(lengths),
    )


def thd_sequences(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """The same sequences as Transformer Engine's kernels take them."""
    boundaries = _boundaries(lengths, device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def similar_lengths(sizes: Tensor) -> list[Tensor]:
    """Sequence numbers in groups of similar length, longest first."""
    descending, order = sizes.sort(descending=True, stable=True)
    groups, first = [], 0
    while first < len(order):
        longest = int(descending[first])
        shortest = 0 if longest <= SHORT_TOKENS else longest * SHORTEST_FRACTION
        last = int((descending >= shortest).sum())
        groups.append(order[first:last])
        first = last
    return groups


class PositionRotaryEmbedding(torch.nn.Module):
    """Stands where GPTModel has its rotary embedding: angles for the positions of packed sequences, by several bases
    beside each other where layers take one of them each."""

    def __init__(self, *inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(self, *unused: Any) -> Tensor:
        """What GPTModel passes on to `forward`: the positions, from the packed sequences that it gives last."""
        packed: PackedSequences = unused[-1]
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles [tokens, 1, 1, bases * rotated elements of a head], the two halves of what is rotated alike."""
        angles = [torch.outer(positions.float(), frequencies) for frequencies in self.inverse_frequencies]
        return torch.cat([half for of_base in angles for half in (of_base, of_base)], dim=-1)[:, None, None, :]


class PackedAttention(torch.nn.Module):
    """Causal core attention within each packed sequence by torch's kernels: of all at once where that can be, else in
    padded batches. With `window` a token attends to so many, itself among them."""

    def __init__(self, *, softmax_scale: float | None, window: int | None = None, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale, self.window = softmax_scale, window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> Tensor:
        """query [tokens, 1, heads, head_dim], key and value [tokens, 1, kv_heads, head_dim]
        -> [tokens, 1, heads * head_dim of value]. Latent attention leaves out the dimension of size 1. What comes wider
        than `value` was rotated so, and is rounded here."""
        packed = packed_seq_params
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key, value = (x.flatten(1, -2) for x in (query, key, value))
        if attends_packed(query, key, value):
            attended = attend_packed(
                query, key, value, packed.boundaries, packed.longest, scale=self.softmax_scale, window=self.window
            )
            return attended.flatten(1)[:, None]
        padded = [_Reindex.apply(x, packed.pad_index, packed.unpad_index) for x in (query, key, value)]
        outputs, first = [], 0
        for num_sequences, width in packed.batches:
            slots, bias = slice(first, first + num_sequences * width), None
            if self.window is not None and self.window < width:
                places = torch.arange(width, device=query.device)
                bias = sees(places, places, self.window)
            q, k, v = (x[slots].view(num_sequences, width, *x.shape[1:]).transpose(1, 2) for x in padded)
            # Padding needs no mask: it comes after the real tokens, which causality keeps from attending to it.
            attended = attend(q, k, v, bias, causal=bias is None, scale=self.softmax_scale)
            outputs.append(attended.transpose(1, 2).reshape(num_sequences * width, -1))
            first = slots.stop
        slots_out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return slots_out.index_select(0, packed.unpad_index)[:, None]


class _Reindex(torch.autograd.Function):
    """Rows of `x` by `pad_index`; its gradient is a gather too, since rows of padding get none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        return x.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (unpad_index,) = ctx.saved_tensors
        return gradients[0].index_select(0, unpad_index), None, None


class GroupedSelfAttention(SelfAttention):
    """Megatron's self-attention, also where the tensor-parallel size exceeds the number of KV heads.

    Megatron's own version of that case asks the global parallel state for rank and group, which a model on its own
    process groups does not have.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """As Megatron has them, but that queries and keys are fp32 where Transformer Engine does not rotate them, which
        rounds once: in half precision each of three operations would round."""
        query, key, value = self._projected(hidden_states, key_value_states, output_gate, split_qkv)
        if self.config.apply_rope_fusion or query.dtype == torch.float64:
            return query, key, value
        return query.float(), key.float(), value

    def _projected(
        self, hidden_states: Tensor, key_value_states: Tensor | None, output_gate: bool, split_qkv: bool
    ) -> Any:
        num_groups = self.config.num_query_groups
        if num_groups >= self.world_size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        ranks_per_group = self.world_size // num_groups
        head_dim = self.hidden_size_per_attention_head
        heads_per_group = self.config.num_attention_heads // num_groups
        mine, share = divmod(self.tp_group.rank(), ranks_per_group)

        shard, _ = self.linear_qkv(hidden_states)
        whole = all_gather_last_dim_from_tensor_parallel_region(shard, group=self.tp_group)
        group = whole.unflatten(-1, (num_groups, heads_per_group + 2, head_dim))[:, :, mine]
        heads_per_rank = heads_per_group // ranks_per_group
        query = group[:, :, share * heads_per_rank : (share + 1) * heads_per_rank]
        key, value = group[:, :, -2:-1], group[:, :, -1:]
        return self.q_layernorm(query), self.k_layernorm(key), value
