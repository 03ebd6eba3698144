"""Context parallelism without Transformer Engine's: a rank has two slices of every packed sequence.

Either all ranks gather all keys and values, with summed gradients in backward (Llama 3, arXiv:2407.21783, section
3.3.2). Or each rank gets all tokens of some heads (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.runtime.process_groups import plain_group
from rltrain.training.megatron.attention import (
    PackedAttention,
    PackedSequences,
    TreeSequences,
    packed_sequences,
    thd_sequences,
    tree_sequences,
)
from rltrain.training.packing import (
    ContextShare,
    MicroBatch,
    WholeSequences,
    back_from_heads,
    positions_of,
    spread_over_heads,
)
from rltrain.training.prefix_tree import ranges
from rltrain.training.sliced_attention import SlicedRows, attend_slices, sliced_rows, tree_rows

RING, BY_HEADS = "p2p", "a2a"
"""Megatron's names of Transformer Engine's ring of keys and values, and of the all-to-all of heads."""


@dataclass
class SlicedSequences(PackedSeqParams, SlicedRows):
    """This rank's slices, and the rows of all ranks that they attend to. Rows are numbered rank by rank."""

    of_all: WholeSequences = field(kw_only=True)


@dataclass
class SpreadHeads(PackedSeqParams):
    """Sequences for attention with different heads on different ranks, each for all tokens."""

    positions: Tensor = field(kw_only=True)
    """Position of each row in its sequence, [rows of this rank]."""
    whole: PackedSequences | TreeSequences = field(kw_only=True)
    """All sequences, laid end to end."""
    of_all: WholeSequences = field(kw_only=True)


def sequences_of_share(
    lengths: Sequence[int], share: ContextShare, device: torch.device, *, by_heads: bool
) -> SlicedSequences | SpreadHeads:
    """Describes packed sequences of these lengths. This rank has two slices of each."""
    positions = positions_of(lengths, share).to(device)
    of_all = WholeSequences.of(lengths, share.size, device)
    if not by_heads:
        return _sliced_sequences(torch.tensor(lengths), share, positions, of_all)
    return SpreadHeads(positions=positions, whole=packed_sequences(lengths, device), of_all=of_all)


def tree_of_share(
    batch: MicroBatch, share: ContextShare, device: torch.device, *, by_heads: bool
) -> SlicedSequences | SpreadHeads:
    """Describes a micro-batch whose samples share prefixes. This rank has two slices of the tree's rows."""
    assert batch.tree is not None
    of_all = WholeSequences.of((sum(batch.segments),), share.size, device)
    sliced = tree_rows(
        *(batch.tree, batch.segments, batch.lengths, SlicedSequences, device, share, of_all.row_of_place), of_all=of_all
    )
    if not by_heads:
        return sliced
    return SpreadHeads(positions=sliced.positions, whole=tree_sequences(batch, device), of_all=of_all)


def thd_slices(lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> PackedSeqParams:
    """Describes the sequences for Transformer Engine.

    It takes the lengths of whole sequences, slices them itself over the ranks of `group`, and issues the messages of
    its ring together. Padding counts as tokens of its sequence. It comes last, so no other token attends to it.
    """
    sequences = thd_sequences(lengths, device)
    sequences.cp_group = plain_group(group)
    sequences.cu_seqlens_q_padded = sequences.cu_seqlens_q
    sequences.cu_seqlens_kv_padded = sequences.cu_seqlens_kv
    return sequences


class GatheredKeysAttention(torch.nn.Module):
    """Causal core attention of this rank's slices to all earlier tokens of their sequences."""

    def __init__(self, *, softmax_scale: float | None, pg_collection: ProcessGroupCollection, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale, self.group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: SlicedSequences,
        **unused: Any,
    ) -> Tensor:
        """Computes PackedAttention.forward for this rank's rows. Collective over: the context-parallel group."""
        query, key, value = (x.flatten(1, -2).to(value.dtype) for x in (query, key, value))
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.group)
        keys, values = both.split([key.size(-1), value.size(-1)], dim=-1)
        return attend_slices(query, keys, values, packed_seq_params, self.softmax_scale).flatten(1)[:, None]


class SpreadHeadsAttention(torch.nn.Module):
    """Causal core attention of all tokens in this rank's share of the heads.

    The number of heads is a multiple of the number of ranks. With fewer key-value heads than ranks, several ranks have
    the same head.
    """

    def __init__(self, *, pg_collection: ProcessGroupCollection, **settings: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.of_whole = PackedAttention(pg_collection=pg_collection, **settings)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: SpreadHeads,
        **unused: Any,
    ) -> Tensor:
        """Computes PackedAttention.forward for this rank's rows. Collective over: the context-parallel group."""
        packed, num_ranks = packed_seq_params, self.group.size()
        key_value = torch.cat([x.flatten(1, -2).to(value.dtype) for x in (key, value)], dim=-1)
        copies = max(1, num_ranks // key_value.size(1))
        queries, of_keys = (
            spread_over_heads(x.unflatten(1, (num_ranks, -1)), packed.of_all, self.group)[:, None]
            for x in (query.flatten(1, -2), key_value.repeat_interleave(copies, dim=1))
        )
        keys, values = of_keys.split([key.size(-1), value.size(-1)], dim=-1)
        attended = self.of_whole(queries, keys, values, None, packed_seq_params=packed.whole)[:, 0]
        return back_from_heads(attended, packed.of_all, self.group).flatten(1)[:, None]


def attends_trees(attention: type[torch.nn.Module], config: TransformerConfig) -> type[torch.nn.Module]:
    """Returns Transformer Engine's core attention for Megatron's layers, extended to samples that share prefixes.

    Its kernels take whole sequences. Trees are computed as in Megatron's own layers.
    """
    of_trees = PackedAttention if config.context_parallel_size == 1 else _attention_of_slices(config)

    class AttentionOfTrees(attention):  # type: ignore[misc, valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.of_trees = of_trees(**settings)

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, packed_seq_params: Any, **settings: Any
        ) -> Any:
            attend = super().forward if packed_seq_params.qkv_format == "thd" else self.of_trees
            return attend(query, key, value, *arguments, packed_seq_params=packed_seq_params, **settings)

    return AttentionOfTrees


def _attention_of_slices(config: TransformerConfig) -> type[torch.nn.Module]:
    return SpreadHeadsAttention if config.cp_comm_type == BY_HEADS else GatheredKeysAttention


def with_context_parallelism(
    block: TransformerBlockSubmodules, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """Replaces the core attention in layers of Megatron's own modules, as `config` requires, and returns the block."""
    attention = _attention_of_slices(config)
    for layer in block.layer_specs or [] if config.context_parallel_size > 1 else []:
        modules = layer.submodules.self_attention.submodules
        if hasattr(modules, "core_attention"):  # gated delta nets spread their heads themselves
            modules.core_attention = attention
    return block


def _sliced_sequences(
    lengths: Tensor, share: ContextShare, positions: Tensor, of_all: WholeSequences
) -> SlicedSequences:
    device = positions.device
    each, starts = lengths // (2 * share.size), lengths.cumsum(0) - lengths
    num_rows = each.repeat_interleave(2)
    num_keys = (each[:, None] * (torch.tensor(share.slices()) + 1)).flatten()
    return sliced_rows(
        num_rows,
        num_keys,
        of_all.row_of_place[ranges(starts.repeat_interleave(2), num_keys).to(device)],
        positions,
        SlicedSequences,
        of_all=of_all,
    )
