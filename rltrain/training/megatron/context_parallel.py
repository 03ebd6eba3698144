"""Context parallelism without Transformer Engine: a rank has two slices of every packed sequence.

Either all ranks gather all keys and values, with summed gradients in backward (Llama 3, arXiv:2407.21783, section
3.3.2). Or each rank gets all tokens of some heads (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.models.attention import attend, attend_packed, attends_packed
from rltrain.runtime.process_groups import plain_group
from rltrain.training.megatron.attention import PackedAttention, PackedSequences, packed_sequences, thd_sequences
from rltrain.training.packed_attention import similar_lengths
from rltrain.training.packing import (
    ContextShare,
    WholeSequences,
    back_from_heads,
    positions_of,
    ranges,
    spread_over_heads,
)

RING, BY_HEADS = "p2p", "a2a"
"""Megatron's names of Transformer Engine's ring of keys and values, and of the all-to-all of heads."""


@dataclass
class SlicedSequences(PackedSeqParams):
    """This rank's slices, and the rows of all ranks that they attend to.

    Rows are numbered in gathered order, rank by rank. The keys of a slice are those of its sequence up to its own last
    token.
    """

    positions: Tensor = field(kw_only=True)
    """Position of each row in its sequence, [rows of this rank]."""
    key_rows: Tensor = field(kw_only=True)
    """Row of each key, slice after slice, [keys]."""
    boundaries: Tensor = field(kw_only=True)
    """Starts of the slices among this rank's rows and the end of the last one, int32 [slices + 1]."""
    key_boundaries: Tensor = field(kw_only=True)
    """Starts of the slices' keys in `key_rows` and the end of the last ones, int32 [slices + 1]."""
    num_rows: Tensor = field(kw_only=True)
    num_keys: Tensor = field(kw_only=True)
    """Number of keys of each slice, [slices], on the host. `num_rows` is the number of its rows."""
    of_all: WholeSequences = field(kw_only=True)

    @cached_property
    def padded(self) -> "PaddedSlices":
        """The slices for kernels on padded batches."""
        return _padded_slices(self)


@dataclass(frozen=True)
class PaddedSlices:
    batches: tuple["SliceBatch", ...]
    slot_of_row: Tensor
    """Slot of each row in the concatenated batches, [rows of this rank]."""


@dataclass(frozen=True)
class SliceBatch:
    """Slices with similar numbers of keys, padded to one shape [slices, width of tokens, width of keys]."""

    rows: Tensor
    """This rank's row in each slot, [slices, tokens]. A slice's last row fills its padding."""
    key_rows: Tensor
    """Row of each key, [slices, keys]."""
    sees: Tensor
    """Whether a token attends to a key, [slices, 1, tokens, keys]."""


@dataclass
class SpreadHeads(PackedSeqParams):
    """Sequences for attention with different heads on different ranks, each for all tokens."""

    positions: Tensor = field(kw_only=True)
    """Position of each row in its sequence, [rows of this rank]."""
    whole: PackedSequences = field(kw_only=True)
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


def with_context_parallelism(
    block: TransformerBlockSubmodules, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """Replaces the core attention in layers of Megatron's own modules, as `config` requires, and returns the block."""
    attention = SpreadHeadsAttention if config.cp_comm_type == BY_HEADS else GatheredKeysAttention
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
    return SlicedSequences(
        positions=positions,
        key_rows=of_all.row_of_place[ranges(starts.repeat_interleave(2), num_keys).to(device)],
        boundaries=_boundaries(num_rows).to(device),
        key_boundaries=_boundaries(num_keys).to(device),
        num_rows=num_rows,
        num_keys=num_keys,
        of_all=of_all,
    )


def _padded_slices(sequences: SlicedSequences) -> PaddedSlices:
    num_rows, num_keys, device = sequences.num_rows, sequences.num_keys, sequences.positions.device
    first, first_key = (x.cumsum(0) - x for x in (num_rows, num_keys))
    batches, slot_of_row, num_slots = [], torch.empty(int(num_rows.sum()), dtype=torch.int64), 0
    for members in similar_lengths(num_keys):
        of_slices, of_keys = num_rows[members, None], num_keys[members, None]
        token = torch.arange(int(of_slices.max())).minimum(of_slices - 1)
        key = torch.arange(int(of_keys.max()))
        rows, last_seen = first[members, None] + token, of_keys - of_slices + token
        batch = SliceBatch(
            rows=rows.to(device),
            key_rows=sequences.key_rows[(first_key[members, None] + key.minimum(of_keys - 1)).to(device)],
            sees=(key.to(device) <= last_seen.to(device)[:, :, None])[:, None],
        )
        batches.append(batch)
        # A row in several slots may use any of them: all have the same result.
        slot_of_row[rows.flatten()] = num_slots + torch.arange(rows.numel())
        num_slots += rows.numel()
    return PaddedSlices(tuple(batches), slot_of_row.to(device))


def _boundaries(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)


def attend_slices(query: Tensor, keys: Tensor, values: Tensor, packed: SlicedSequences, scale: float | None) -> Tensor:
    """Returns attention [rows of this rank, heads, head_dim of values].

    `query` is [rows of this rank, heads, head_dim]. `keys` and `values` are [rows of all ranks, kv_heads, ...].
    """
    if attends_packed(query, keys, values):
        keys, values = (x.index_select(0, packed.key_rows) for x in (keys, values))
        return attend_packed(
            query,
            keys,
            values,
            packed.boundaries,
            int(packed.num_rows.max()),
            key_boundaries=packed.key_boundaries,
            longest_keys=int(packed.num_keys.max()),
            scale=scale,
        )
    outputs = []
    for batch in packed.padded.batches:
        q, k, v = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((query, batch.rows), (keys, batch.key_rows), (values, batch.key_rows))
        )
        outputs.append(attend(q, k, v, batch.sees, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.padded.slot_of_row)
