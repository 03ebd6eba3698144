"""Gated delta nets of transformers' models over packed sequences, in the place of their own computation.

transformers' own takes packed sequences by the kernels of flash-linear-attention alone, and else for one sequence. Of
what lies between the projections nothing is kept for backward: it is computed again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rltrain.models.delta_rule import PackedStates, convolve, gated_delta_rule, gated_norm, gates, packed_states
from rltrain.training.fsdp.attention import SEQUENCES
from rltrain.training.packed_attention import PackedRows

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
