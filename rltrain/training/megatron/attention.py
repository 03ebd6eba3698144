"""Attention over packed sequences without Transformer Engine: plain, fused for CPUs, and latent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models import Architecture
from rltrain.models.attention import fused_kernels_for, halves_of_pairs, inverse_frequencies
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.training.megatron.norms import ProjectionNorm, parameter_device
from rltrain.training.megatron.platform import Gradients, TurnedHeads, takes_fused
from rltrain.training.megatron.versions import ModulesOfSpec
from rltrain.training.packed_attention import PackedRows, boundaries_of, packed_rows
from rltrain.training.packing import MicroBatch
from rltrain.training.recipes import MadeAgain, with_recipe
from rltrain.training.sliced_attention import SlicedRows, attend_rows, tree_rows

# Packed attention without Transformer Engine, also with more tensor-parallel ranks than KV heads.


@dataclass
class PackedSequences(PackedSeqParams, PackedRows):
    """Packed sequences for Megatron's layers.

    `qkv_format` is deliberately not "thd". Megatron then keeps its plain rotary embedding with one row per token,
    instead of splitting the tokens by sequence in every layer.
    """


@dataclass
class TreeSequences(PackedSeqParams, SlicedRows):
    """Samples that share prefixes, for Megatron's layers."""


def tree_sequences(batch: MicroBatch, device: torch.device) -> TreeSequences:
    """Describes a micro-batch whose samples share prefixes."""
    assert batch.tree is not None
    return tree_rows(batch.tree, batch.segments, batch.lengths, TreeSequences, device)


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Describes sequences packed in the order of `lengths`."""
    return packed_rows(lengths, device, PackedSequences)


def thd_sequences(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Describes the sequences for Transformer Engine's kernels."""
    boundaries = boundaries_of(lengths, device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


class PositionRotaryEmbedding(torch.nn.Module):
    """A replacement for Megatron's rotary embedding, with angles for the positions of packed sequences.

    If layers have different bases, the angles of all bases are side by side. `axes` are those of axis_of_frequency.
    """

    def __init__(self, *inverse_frequencies: Tensor, axes: Tensor | None = None) -> None:
        super().__init__()
        self.inverse_frequencies, self.axes = inverse_frequencies, axes

    def get_rotary_seq_len(self, *unused: Any) -> Tensor:
        """Returns the positions of the packed sequences, from the last argument. The model passes them to `forward`.

        With images they are the attribute `rope_positions` of the sequences, [3, tokens].
        """
        packed: PackedSequences = unused[-1]
        positions: Tensor = getattr(packed, "rope_positions", packed.positions)
        return positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Returns angles [tokens, 1, 1, bases * rotated elements of a head]. Both halves of the rotated elements are
        equal. `positions` are [tokens], or [3, tokens] with `axes`."""
        if positions.dim() == 1:
            angles = [torch.outer(positions.float(), frequencies) for frequencies in self.inverse_frequencies]
        else:
            assert self.axes is not None, "the model must have three positions of a token"
            of_frequencies = positions.float()[self.axes].T
            angles = [of_frequencies * frequencies for frequencies in self.inverse_frequencies]
        return torch.cat([half for of_base in angles for half in (of_base, of_base)], dim=-1)[:, None, None, :]


class MegatronRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding for Transformer Engine's layers, with the model's own frequencies.

    Samples that share prefixes get angles for the positions of their rows.
    """

    def __init__(self, frequencies: Tensor, config: TransformerConfig, cp_group: Any) -> None:
        super().__init__(
            2 * len(frequencies),
            rotary_percent=1.0,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=cp_group,
        )
        self.inv_freq = frequencies

    def get_rotary_seq_len(self, *arguments: Any) -> Any:
        """Returns the length of the longest sequence, or the positions of shared rows. The last argument describes the
        sequences."""
        packed = arguments[-1]
        return super().get_rotary_seq_len(*arguments) if packed.qkv_format == "thd" else packed.positions

    def forward(self, length: int | Tensor, *arguments: Any, **settings: Any) -> Any:
        """Returns angles [length or rows, 1, 1, rotated elements of a head]."""
        if isinstance(length, Tensor):
            return PositionRotaryEmbedding(self.inv_freq)(length)
        return super().forward(length, *arguments, **settings)


class PackedAttention(torch.nn.Module):
    """Causal core attention within each packed sequence by torch's kernels.

    All sequences are computed at once if the kernel allows it, else in padded batches. `window` and `softcap` are those
    of attend_blockwise. With `sinks` every head has one more score without a value: `softmax_offset` [heads].
    """

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
        """Whether the scores need more than a plain attention kernel."""
        return self.softcap is not None or self.softmax_offset is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences | TreeSequences,
        **unused: Any,
    ) -> Tensor:
        """Maps query [tokens, 1, heads, head_dim], key and value [tokens, 1, kv_heads, head_dim] to [tokens, 1, heads *
        head_dim of value].

        Latent attention leaves out the dimension of size 1. Queries and keys may be wider than `value` after rotation.
        They are rounded here.
        """
        packed = packed_seq_params
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key, value = (x.flatten(1, -2) for x in (query, key, value))
        attended = attend_rows(
            query, key, value, packed, self.softmax_scale, self.window, self.softcap, self.softmax_offset
        )
        return attended.flatten(1)[:, None]


class GroupedSelfAttention(SelfAttention):
    """Megatron's self-attention, also for more tensor-parallel ranks than KV heads.

    For that case Megatron's own version asks the global parallel state for rank and group, but this model has its own
    process groups.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Returns Megatron's tensors, with fp32 queries and keys unless Transformer Engine rotates them.

        Transformer Engine's rotation rounds once. In half precision each of three operations would round.
        """
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


# Self-attention over packed sequences on CPUs, between the two projections.

LONGEST_BY_PRODUCTS = 64
"""Longest sequence for batched products with score matrices. Up to it they take 0.6 of the time of torch's kernel, and
scores take only a few times the memory of queries."""


class PaddedRows(NamedTuple):
    """Row indices for converting heads of tokens to heads of padded sequences. A row has `head_dim` elements."""

    padding: Tensor
    """Source row in [tokens, heads] of each row of [sequences, heads, width]: shape [sequences * heads * width]."""
    unpadding: Tensor
    """The opposite direction: shape [tokens * heads]."""

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

    `heads` are [tokens, groups, heads of a group, head_dim]: a group's queries, then its key, then its value. The
    result is [tokens, 1, all queries * head_dim].
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
        # Padding needs no mask: it comes after the real tokens, and causal attention never looks ahead.
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
    """A layer's part of the model's rotary angles: base number `base`, for the first `size` elements of its heads.

    These elements are also multiplied by `magnitude`. With `pairs` neighbouring elements are rotated together.
    """

    size: int
    base: int = 0
    magnitude: float = 1.0
    pairs: bool = False

    def angles(self, of_model: Tensor) -> Tensor:
        """Selects the layer's angles [tokens, 1, 1, size] from those of all bases."""
        return of_model.narrow(-1, self.base * self.size, self.size)


class FusedSelfAttention(GroupedSelfAttention):
    """Megatron's self-attention. On CPUs in full precision, and with fused kernels, few operations take all heads."""

    def __init__(self, *arguments: Any, rotary: OwnRotary, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rotary = rotary
        self.is_made_again = False
        """Whether backward makes rotated queries and keys again, if a kernel rotates them."""
        self.norms_projections = isinstance(self.q_layernorm, ProjectionNorm)
        if self.norms_projections:
            self.q_layernorm.tp_group = self.k_layernorm.tp_group = self.tp_group

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences | TreeSequences,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rotary_pos_emb = self.rotary.angles(rotary_pos_emb)
        whole_groups = self.config.num_query_groups >= self.world_size
        whole_sequences = self.config.context_parallel_size == 1
        takes_one_by_one = self.norms_projections or self.config.attention_output_gate
        kernels = fused_kernels_for(hidden_states)
        takes_all = takes_fused(hidden_states) or kernels is not None
        if not (takes_all and whole_groups and whole_sequences) or takes_one_by_one:
            settings |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            unfused: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, **settings)
            return unfused
        projected, _ = self.linear_qkv(hidden_states)
        if kernels is not None:
            attended = self._attended_by_kernels(kernels, projected, rotary_pos_emb, packed_seq_params)
        else:
            attended = self._attended(self._turned(projected, rotary_pos_emb, packed_seq_params), packed_seq_params)
        projection: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return projection

    def get_query_key_value_tensors(self, *arguments: Any, **settings: Any) -> Any:
        """Returns the tensors of GroupedSelfAttention in the form of Megatron's rotation: of halves, without a
        magnitude."""
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

    def _attended_by_kernels(
        self, kernels: Any, projected: Tensor, angles: Tensor, packed: PackedSequences | TreeSequences
    ) -> Tensor:
        """Returns the attention output, [tokens, 1, queries * head_dim]. One kernel normalizes and rotates heads."""
        head_dim, half = self.hidden_size_per_attention_head, angles.size(-1) // 2
        heads = projected.view(len(projected), self.num_query_groups_per_partition, -1, head_dim)

        def rotation() -> tuple[Tensor, Tensor]:
            of_half = angles[:, 0, 0, :half]
            return of_half.cos() * self.rotary.magnitude, of_half.sin() * self.rotary.magnitude

        turn = kernels.Turn(*packed.once(f"halves of rotation {self.rotary.base}", rotation), half, self.rotary.pairs)
        if self.config.qk_layernorm:
            norms = self.q_layernorm, self.k_layernorm
            turn = turn._replace(norms=tuple(x.weight for x in norms), eps=norms[0].eps, offset=norms[0].offset)
        turned = kernels.turned_groups(heads, turn)
        if self.is_made_again:
            with_recipe(turned[:2], lambda heads: kernels.turned_groups(heads, turn)[:2], heads)
        rows = [one[:, None] for one in turned]

        def attend(*rows: Tensor) -> Tensor:
            attended: Tensor = self.core_attention(*rows, None, packed_seq_params=packed)
            return attended

        with MadeAgain(*turned[:2]):
            if self.checkpoint_core_attention and self.training:
                return checkpoint(attend, False, *rows)
            return attend(*rows)

    def _turned(self, projected: Tensor, angles: Tensor, packed: PackedSequences | TreeSequences) -> Tensor:
        """Returns normalized and rotated heads, [tokens, groups, heads of a group, head_dim]."""
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

    def _attended(self, heads: Tensor, packed: PackedSequences | TreeSequences) -> Tensor:
        """Returns the attention output, [tokens, 1, queries * head_dim]."""
        core = self.core_attention
        scale = core.softmax_scale or heads.size(-1) ** -0.5

        def attend(heads: Tensor) -> Tensor:
            is_short = isinstance(packed, PackedSequences) and packed.longest <= LONGEST_BY_PRODUCTS
            if is_short and not core.takes_scores:
                attended: Tensor = ShortAttention.apply(heads, packed, scale, core.window)
                return attended
            query, key, value = heads.split([heads.size(2) - 2, 1, 1], dim=2)
            query, key, value = (part.flatten(1, 2)[:, None] for part in (query, key, value))
            return core(query, key, value, None, packed_seq_params=packed)

        if self.checkpoint_core_attention and self.training:
            return checkpoint(attend, False, heads)
        return attend(heads)


def rotation(angles: Tensor, heads: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for TurnedHeads from angles [tokens, 1, 1, rotated elements of a head]."""
    size, unturned = angles.size(-1), (0, heads.size(-1) - angles.size(-1))
    cos = torch.nn.functional.pad(angles.cos() * magnitude, unturned, value=1.0)
    sin = torch.nn.functional.pad(angles.sin() * magnitude, unturned)
    cos, sin = (part.to(heads.dtype).expand_as(heads).contiguous() for part in (cos, sin))
    sin[..., : size // 2].neg_()
    cos[:, :, -1], sin[:, :, -1] = 1, 0
    return cos, sin


# Multi-head latent attention (DeepSeek-V3, Moonlight) over packed sequences, without Transformer Engine.


class ExplicitLatentAttention(ModulesOfSpec, MLASelfAttention):
    """Megatron's latent attention on explicit process groups.

    Megatron's own asks the global parallel state for the group of the queries' projection from the hidden state.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        **settings: Any,
    ) -> None:
        with_group = ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        super().__init__(config, replace(submodules, linear_q_proj=with_group), pg_collection=pg_collection, **settings)
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):
            projection: Any = getattr(self, name, None)
            if hasattr(projection, "eps"):  # Transformer Engine's, with the latent's norm inside
                projection.eps = LATENT_NORM_EPS


class LatentSelfAttention(ExplicitLatentAttention):
    """Latent attention of Megatron's own layers. Their projections to latents are split too.

    Megatron's own asks the global parallel state for the group to gather these latents.
    """

    def __init__(self, config: MLATransformerConfig, *arguments: Any, **settings: Any) -> None:
        super().__init__(config, *arguments, **settings)
        self.linear_kv_down_proj.register_forward_hook(_whole_latent)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(projection: ColumnParallelLinear, _: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Returns (all elements of the latents of this rank's tokens, the projection's bias), from a share of all tokens'
    latents.

    Collective over: the tensor-parallel group.
    """
    whole = gather_from_tensor_model_parallel_region(output[0], group=projection.tp_group)
    if projection.sequence_parallel:
        whole = scatter_to_sequence_parallel_region(whole, group=projection.tp_group)
    return whole, output[1]


class LatentRotaryEmbedding(PositionRotaryEmbedding):
    """The rotary embedding of MLASelfAttention for positions in packed sequences."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        super().__init__(inverse_frequencies(architecture).to(device))
        self.magnitude = architecture.rotation_magnitude

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Returns angles [tokens, 1, rotated elements] for all heads, with `magnitude` unless it is 1."""
        return _beside(self.magnitude, super().forward(positions)[:, 0])


class MegatronLatentRotaryEmbedding(MegatronRotaryEmbedding):
    """The rotary embedding of MLASelfAttention of Transformer Engine's modules."""

    def __init__(
        self, architecture: Architecture, config: MLATransformerConfig, device: torch.device, like: Any
    ) -> None:
        super().__init__(inverse_frequencies(architecture).to(device), config, like.cp_group)
        self.magnitude = architecture.rotation_magnitude

    def forward(self, length: int | Tensor, *arguments: Any, **settings: Any) -> Any:
        """Returns Megatron's angles, with `magnitude` unless it is 1. Those of shared rows are [rows, 1, ...]."""
        angles = super().forward(length, *arguments, **settings)
        return _beside(self.magnitude, angles[:, 0] if isinstance(length, Tensor) else angles)


def _beside(magnitude: float, angles: Tensor) -> Tensor | tuple[Tensor, float]:
    """Returns the form expected by Megatron under attention_settings: angles, or angles and magnitude."""
    return angles if magnitude == 1 else (angles, magnitude)


def rotate_by_position(model: torch.nn.Module, architecture: Architecture, device: torch.device) -> None:
    """Gives all latent attention in `model` a rotary embedding with the model's frequencies."""
    packed = LatentRotaryEmbedding(architecture, device)
    for module in model.modules():
        if isinstance(module, LatentSelfAttention):
            module.rotary_pos_emb = packed
        elif isinstance(module, ExplicitLatentAttention):
            module.rotary_pos_emb = MegatronLatentRotaryEmbedding(
                architecture, module.config, device, module.rotary_pos_emb
            )
