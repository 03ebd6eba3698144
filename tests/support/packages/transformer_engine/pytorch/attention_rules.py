"""Attention by the rules of Transformer Engine 2.20 over packed sequences, with optional context parallelism.

Refuses the inputs that Transformer Engine refuses: see dot_product_attention.py, utils.get_attention_backend,
context_parallel.py and fused_attn.cpp there. Other inputs are computed in the plainest way, in their own precision.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.nn import Module

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Limits of all kernels for context parallelism: those of cuDNN and of flash-attn 2 and 3."""
HALF_PRECISION = (torch.bfloat16, torch.float16)
RING, ALL_GATHER, BY_HEADS, BOTH = "p2p", "all_gather", "a2a", "a2a+p2p"


class DotProductAttention(Module):
    """Has no parameters. `kv_channels` are the elements per head of keys, or a pair (keys, values)."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        tp_group: Any,
        layer_number: int,
        num_gqa_groups: int | None,
        attention_type: str,
        softmax_scale: float | None,
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = RING,
    ) -> None:
        super().__init__()
        self.cp_comm_type = cp_comm_type
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        tp_size = tp_size if tp_group is None else tp_group.size()
        num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % num_gqa_groups == 0
        assert num_attention_heads % tp_size == 0 and num_gqa_groups % tp_size == 0
        self.num_gqa_groups_per_partition = num_gqa_groups // tp_size
        of_keys, of_values = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = of_keys, of_values
        self.softmax_scale = softmax_scale or of_keys**-0.5

    @property
    def head_dims(self) -> tuple[int, int]:
        """The elements per head of keys and of values. Megatron changes them during a call while it pads values."""
        return self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = RING
    ) -> None:
        """Asserts complete and known settings of context parallelism."""
        if cp_group is not None:
            assert cp_global_ranks == get_process_group_ranks(cp_group) and cp_stream is not None
            assert cp_comm_type in (RING, ALL_GATHER, BY_HEADS, BOTH)
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """Returns the attention output, shape [rows, heads * head_dim of values].

        `query_layer` has shape [rows of this rank, heads, head_dim], `key_layer` and `value_layer` [rows, kv heads,
        ...]. Collective over: the context-parallel ranks.
        """
        self._check_tensors(query_layer, key_layer, value_layer)
        assert qkv_format == "thd" and attn_mask_type == "padding_causal" and attention_mask is None
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None and max_seqlen_q == max_seqlen_kv
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and cu_seqlens_q.dim() == 1
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) <= (max_seqlen_q or 0)
        whole = [query_layer, key_layer, value_layer]
        if self.num_shares > 1:
            # The same object means no padding between sequences. flash-attn 2 would not skip padding.
            assert cu_seqlens_q_padded is cu_seqlens_q and cu_seqlens_kv_padded is cu_seqlens_kv
            self._check_shares(query_layer, key_layer, lengths)
            places = self._places(lengths)
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather

            whole = [gather(x, group=self.cp_group)[places.argsort()] for x in whole]
        attended = _attended(*whole, lengths, self.softmax_scale)
        if self.num_shares > 1:
            attended = attended[places.chunk(self.num_shares)[self.cp_group.rank()]]
        return attended.flatten(1)

    @property
    def num_shares(self) -> int:
        return 1 if self.cp_group is None else int(self.cp_group.size())

    def _check_tensors(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        assert query.dtype == key.dtype == value.dtype, "Queries, keys and values must have the same data type!"
        assert query.dim() == key.dim() == value.dim() == 3, "must be 3D tensors when qkv_format = thd"
        assert key.shape[:-1] == value.shape[:-1] and query.size(-1) == key.size(-1)
        assert (key.size(-1), value.size(-1)) == self.head_dims
        assert key.size(-2) == self.num_gqa_groups_per_partition

    def _check_shares(self, query: Tensor, key: Tensor, lengths: list[int]) -> None:
        """Checks sizes for context parallelism.

        Keys and values may differ in size from queries in every method if kernels support the sizes. All-to-all needs
        whole shares of heads.
        """
        if query.dtype not in HALF_PRECISION or any(
            size % HEAD_MULTIPLE or size > LARGEST_HEAD for size in self.head_dims
        ):
            raise ValueError("No dot product attention backend is available for the provided inputs.")
        assert all(length % (2 * self.num_shares) == 0 for length in lengths)
        assert len(query) * self.num_shares == sum(lengths)
        if self.cp_comm_type == BY_HEADS:
            assert query.size(-2) % self.num_shares == 0 and key.size(-2) % self.num_shares == 0, (
                "cp_comm_type='a2a' requires num_heads % cp_size == 0 for Q, K, V."
            )

    def _places(self, lengths: list[int]) -> Tensor:
        """Returns the place of each row among all tokens. Rows of all ranks follow rank by rank."""
        numbers = torch.arange(sum(lengths)).split(lengths)
        slices = [sequence.chunk(2 * self.num_shares) for sequence in numbers]
        return torch.cat(
            [part for rank in range(self.num_shares) for of in slices for part in (of[rank], of[-1 - rank])]
        )


def _attended(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Returns the output for consecutive whole sequences, shape [tokens, heads, head_dim of values]."""
    copies = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    outputs = []
    for q, k, v in zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True):
        unseen = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scale).masked_fill(unseen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)
