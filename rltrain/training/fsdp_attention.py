"""Packed sequences in transformers' models: attention, gated delta nets, context parallelism by heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rltrain.models.delta_rule import PackedStates, convolve, gated_delta_rule, gated_norm, gates, packed_states
from rltrain.training.packed_attention import PackedRows, attend_rows, packed_rows
from rltrain.training.packing import ContextShare, WholeSequences, back_from_heads, positions_of, spread_over_heads

# Context parallelism by heads: every rank attends with all tokens in some heads.


@dataclass(frozen=True, eq=False)
class SequenceSlices:
    """Packed sequences of which each rank of `group` has slices, and in attention all tokens of its heads."""

    positions: Tensor
    """[rows of this rank] position of each in its sequence."""
    packed: PackedRows
    """All sequences, laid end to end."""
    whole: WholeSequences
    group: dist.ProcessGroup

    def scattered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values [rows of this rank, heads, ...] -> [tokens, heads of this rank, ...] each. With
        fewer key-value heads than ranks several ranks have the same one. Collective over: the group."""
        size = self.group.size()
        copied = [x.repeat_interleave(max(1, size // x.size(1)), dim=1) for x in tensors]
        return [spread_over_heads(x.unflatten(1, (size, -1)), self.whole, self.group) for x in copied]

    def gathered(self, attended: Tensor) -> Tensor:
        """[tokens, heads of this rank, ...] -> [rows of this rank, heads, ...]. Collective over: the group."""
        return back_from_heads(attended, self.whole, self.group).flatten(1, 2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """[heads] -> [heads of this rank]"""
        return of_heads.unflatten(0, (self.group.size(), -1))[self.group.rank()]


def spread_heads(
    lengths: Sequence[int], share: ContextShare, device: torch.device, group: dist.ProcessGroup
) -> SequenceSlices:
    """For packed sequences of these lengths, of each of which this rank has two slices."""
    packed, whole = packed_rows(lengths, device, PackedRows), WholeSequences.of(lengths, share.size, device)
    return SequenceSlices(positions_of(lengths, share).to(device), packed, whole, group)


# Attention of transformers' models over packed sequences, in the place of its own.
#
# transformers gives its layers every further argument of a model's call, and they give it to attention: so the
# sequences arrive here.

NAME = "rltrain_packed"
SEQUENCES = "rltrain_sequences"
"""The argument by which a model's call passes the sequences."""


class HeadRows(NamedTuple):
    """[tokens, heads, ...] each"""

    query: Tensor
    key: Tensor
    value: Tensor


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, ...] -> [1, rows, heads, head_dim of value].

    A token attends to those before it in its sequence, of which `sliding_window` leaves the last ones; where it is not
    among `arguments` transformers has it in the mask alone, by the attribute of `module`. `softcap` bends scores, and
    `s_aux` [heads] is one more score that nothing is taken from. Collective over: the context-parallel group.
    """
    window = arguments.get("sliding_window", getattr(module, "sliding_window", None))
    sequences = arguments.get(SEQUENCES)
    if sequences is None:
        raise RuntimeError(
            f"{type(module).__name__} of transformers does not pass on what its model is called with, so that it could "
            "not tell packed sequences apart: actor.backend fsdp cannot train it"
        )
    rows = HeadRows(*(x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)))
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    if isinstance(sequences, SequenceSlices):
        heads = HeadRows(*sequences.scattered(rows))
        sinks = None if s_aux is None else sequences.own_heads(s_aux)
        attended = attend_rows(*heads, sequences.packed, scale, window, softcap, sinks)
        return sequences.gathered(attended)[None], None
    return attend_rows(*rows, sequences, scale, window, softcap, s_aux)[None], None


def register() -> None:
    """Have transformers know it as NAME."""
    AttentionInterface.register(NAME, packed_attention)


# Gated delta nets of transformers' models over packed sequences, in the place of their own computation.
#
# transformers' own takes packed sequences by the kernels of flash-linear-attention alone, and else for one sequence.
# Of what lies between the projections nothing is kept for backward: it is computed again.

CLASS_ENDING = "GatedDeltaNet"
"""Of the names of transformers' classes."""


def compute_packed(module: torch.nn.Module) -> None:
    """Have all gated delta nets in `module` tell packed sequences apart."""
    for part in module.modules():
        if type(part).__name__.endswith(CLASS_ENDING):
            part.forward = _forward_of(part)


def _forward_of(net: Any) -> Callable[..., Tensor]:
    def forward(
        hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """hidden_states [1, rows, hidden] -> as much."""
        sequences: PackedRows = arguments[SEQUENCES]
        kernel = net.conv_kernel_size
        packed = sequences.once("delta net", lambda: packed_states(sequences.lengths, kernel, hidden_states.device))
        projected = _projected(net, hidden_states)
        repeats = torch.is_grad_enabled() and any(kind.requires_grad for kind in projected)
        heads: Tensor = (
            checkpoint(_heads, net, packed, *projected, use_reentrant=False)
            if repeats
            else _heads(net, packed, *projected)
        )
        output: Tensor = net.out_proj(heads[None])
        return output

    return forward


def _projected(net: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """[rows, ...] what the convolution mixes; of each head the gate [heads, value_dim], and what tells how much of a
    token it takes in and keeps of its state [heads]."""
    if not hasattr(net, "in_proj_qkvz"):
        of_rows = (net.in_proj_qkv(hidden), net.in_proj_z(hidden), net.in_proj_b(hidden), net.in_proj_a(hidden))
        mixed, gate, weights, decays = (kind[0] for kind in of_rows)
        return mixed, gate.unflatten(-1, (-1, net.head_v_dim)), weights, decays
    turns = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
    queries, keys, values, gate, weights, decays = (kind[0] for kind in turns)
    return torch.cat([kind.flatten(1) for kind in (queries, keys, values)], dim=-1), gate, weights, decays


def _heads(net: Any, packed: PackedStates, mixed: Tensor, gate: Tensor, weights: Tensor, decays: Tensor) -> Tensor:
    """[rows, all values]. Parameters are read here: they are gathered again before they are needed again."""
    convolved, _ = convolve(mixed, net.conv1d.weight[:, 0], packed)
    sizes = ((net.key_dim, net.head_k_dim), (net.key_dim, net.head_k_dim), (net.value_dim, net.head_v_dim))
    queries, keys, values = (
        part.unflatten(-1, (-1, size))
        for part, (_, size) in zip(convolved.split([whole for whole, _ in sizes], dim=-1), sizes, strict=True)
    )
    taken, kept = gates(weights, decays, net.A_log, net.dt_bias)
    heads, _ = gated_delta_rule(queries, keys, values, taken, kept, packed)
    return gated_norm(heads, gate, net.norm.weight, net.layer_norm_epsilon).flatten(1)
