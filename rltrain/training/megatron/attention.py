"""Attention over packed sequences without Transformer Engine, and tensor parallelism above the number of KV heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.training.megatron.norms import parameter_device
from rltrain.training.packed_attention import PackedRows, attend_rows, boundaries_of, packed_rows


@dataclass
class PackedSequences(PackedSeqParams, PackedRows):
    """Packed sequences for Megatron's layers.

    `qkv_format` is deliberately not "thd": Megatron then keeps its plain rotary embedding, which takes one row per
    token here, in place of one that splits the tokens by sequence in every layer.
    """


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """For sequences packed in the order of `lengths`."""
    return packed_rows(lengths, device, PackedSequences)


def thd_sequences(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """The same sequences as Transformer Engine's kernels take them."""
    boundaries = boundaries_of(lengths, device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


class PositionRotaryEmbedding(torch.nn.Module):
    """Takes the place of Megatron's rotary embedding: makes the angles for the positions of packed sequences.

    Where layers differ in their base, the angles of all bases lie beside each other.
    """

    def __init__(self, *inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(self, *unused: Any) -> Tensor:
        """Returns the positions of the packed sequences, which are given last. The model passes them to `forward`."""
        packed: PackedSequences = unused[-1]
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles [tokens, 1, 1, bases * rotated elements of a head], the two halves of what is rotated alike."""
        angles = [torch.outer(positions.float(), frequencies) for frequencies in self.inverse_frequencies]
        return torch.cat([half for of_base in angles for half in (of_base, of_base)], dim=-1)[:, None, None, :]


class PackedAttention(torch.nn.Module):
    """Causal core attention within each packed sequence by torch's kernels: of all at once where that can be, else in
    padded batches. With `window` a token attends to so many, itself among them; with `softcap` scores are bent. With
    `sinks` every head has a further score, `softmax_offset` [heads], of nothing."""

    def __init__(
        self,
        config: TransformerConfig | None = None,
        *,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            assert config is not None and pg_collection is not None
            num_heads = config.num_attention_heads // pg_collection.tp.size()
            offset = torch.empty(num_heads, dtype=config.params_dtype, device=parameter_device(config))
            self.softmax_offset = torch.nn.Parameter(offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.softmax_scale, self.window, self.softcap = softmax_scale, window, softcap

    @property
    def takes_scores(self) -> bool:
        """Whether more is done with scores than a kernel for plain attention knows."""
        return self.softcap is not None or self.softmax_offset is not None

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
        attended = attend_rows(
            query, key, value, packed, self.softmax_scale, self.window, self.softcap, self.softmax_offset
        )
        return attended.flatten(1)[:, None]


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
        query, key, value, *gate = self._projected(hidden_states, key_value_states, output_gate, split_qkv)
        if self.config.apply_rope_fusion or query.dtype == torch.float64:
            return query, key, value, *gate
        return query.float(), key.float(), value, *gate

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
        per_head = 2 if output_gate else 1
        group = whole.unflatten(-1, (num_groups, per_head * heads_per_group + 2, head_dim))[:, :, mine]
        heads_per_rank = heads_per_group // ranks_per_group
        first = share * heads_per_rank
        query = group[:, :, first : first + heads_per_rank]
        key, value = group[:, :, -2:-1], group[:, :, -1:]
        gate = [group[:, :, heads_per_group:][:, :, first : first + heads_per_rank]] if output_gate else []
        return self.q_layernorm(query), self.k_layernorm(key), value, *gate
