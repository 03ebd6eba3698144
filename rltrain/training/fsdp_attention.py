"""Packed sequences in transformers' models: attention, delta nets, context parallelism by heads, fused kernels."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import unwrap
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rltrain.config.models import RecomputedModule
from rltrain.models.attention import fused_kernels_for
from rltrain.models.delta_rule import PackedStates, convolve, gated_delta_rule, gated_norm, gates, packed_states
from rltrain.training.packed_attention import PackedRows, packed_rows
from rltrain.training.packing import (
    ContextShare,
    MicroBatch,
    WholeSequences,
    back_from_heads,
    places_of,
    positions_of,
    spread_over_heads,
)
from rltrain.training.recipes import MadeAgain, with_recipe
from rltrain.training.sliced_attention import SlicedRows, attend_rows, tree_rows

# Context parallelism by heads: every rank attends over all tokens in some heads.


@dataclass(frozen=True, eq=False)
class SequenceSlices:
    """Packed sequences with slices on each rank of `group`. In attention a rank has all tokens of its heads."""

    positions: Tensor
    """Position of each row in its sequence, [rows of this rank]."""
    packed: PackedRows | SlicedRows
    """All sequences, laid end to end."""
    whole: WholeSequences
    group: dist.ProcessGroup

    def scattered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchanges queries, keys and values [rows of this rank, heads, ...] for [tokens, heads of this rank, ...]
        each.

        With fewer key-value heads than ranks, several ranks have the same head. Collective over: the group.
        """
        size = self.group.size()
        copied = [x.repeat_interleave(max(1, size // x.size(1)), dim=1) for x in tensors]
        return [spread_over_heads(x.unflatten(1, (size, -1)), self.whole, self.group) for x in copied]

    def gathered(self, attended: Tensor) -> Tensor:
        """Exchanges [tokens, heads of this rank, ...] for [rows of this rank, heads, ...].

        Collective over: the group.
        """
        return back_from_heads(attended, self.whole, self.group).flatten(1, 2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """Selects this rank's heads: [heads] -> [heads of this rank]."""
        return of_heads.unflatten(0, (self.group.size(), -1))[self.group.rank()]


def spread_heads(
    lengths: Sequence[int], share: ContextShare, device: torch.device, group: dist.ProcessGroup
) -> SequenceSlices:
    """Returns the slices of packed sequences of these lengths. This rank has two slices of each."""
    packed, whole = packed_rows(lengths, device, PackedRows), WholeSequences.of(lengths, share.size, device)
    return SequenceSlices(positions_of(lengths, share).to(device), packed, whole, group)


def spread_tree(
    batch: MicroBatch, share: ContextShare, device: torch.device, group: dist.ProcessGroup
) -> SequenceSlices:
    """Returns the slices of samples that share prefixes. This rank has two slices of the tree's rows."""
    assert batch.tree is not None
    whole = WholeSequences.of((sum(batch.segments),), share.size, device)
    rows = tree_rows(batch.tree, batch.segments, batch.lengths, SlicedRows, device)
    positions = rows.positions[places_of((sum(batch.segments),), share).to(device)]
    return SequenceSlices(positions, rows, whole, group)


# Attention over packed sequences in transformers' models.
#
# transformers passes unknown arguments of a model's call to its layers, and these pass them to attention. So attention
# receives the sequences.

NAME = "rltrain_packed"
SEQUENCES = "rltrain_sequences"
"""Argument of a model's call for the sequences."""


class HeadRows(NamedTuple):
    """Query, key and value, [tokens, heads, ...] each."""

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
    """Returns attention [1, rows, heads, head_dim of value] of query [1, heads, rows, head_dim] and key and value [1,
    kv_heads, rows, ...].

    A token attends to its sequence up to itself, within the last `sliding_window` tokens. If `arguments` lacks the
    window, it is the attribute of `module`. `softcap` limits scores by tanh. `s_aux` [heads] are attention sinks: one
    more score per head, without a value. Collective over: the context-parallel group.
    """
    window = arguments.get("sliding_window", getattr(module, "sliding_window", None))
    sequences = arguments.get(SEQUENCES)
    if sequences is None:
        raise RuntimeError(
            f"{type(module).__name__} of transformers does not pass the arguments of its model's call to attention, so "
            "it cannot separate packed sequences and actor.backend fsdp cannot train it; use actor.backend: megatron"
        )
    # Not x[0]: its gradient would be copied into zeros.
    rows = HeadRows(*(x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value)))
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    if isinstance(sequences, SequenceSlices):
        heads = HeadRows(*sequences.scattered(rows))
        sinks = None if s_aux is None else sequences.own_heads(s_aux)
        attended = attend_rows(*heads, sequences.packed, scale, window, softcap, sinks)
        return sequences.gathered(attended)[None], None
    return attend_rows(*rows, sequences, scale, window, softcap, s_aux)[None], None


def register() -> None:
    """Registers this attention in transformers as NAME."""
    AttentionInterface.register(NAME, packed_attention)


# Gated delta nets over packed sequences in transformers' models.
#
# transformers' own forward handles packed sequences only with the kernels of flash-linear-attention. Everything between
# the projections is recomputed in backward.

CLASS_ENDING = "GatedDeltaNet"
"""Ending of the names of transformers' classes."""


def compute_packed(module: torch.nn.Module) -> None:
    """Makes all gated delta nets in `module` treat packed sequences separately."""
    for part in module.modules():
        if type(part).__name__.endswith(CLASS_ENDING):
            part.forward = _forward_of(part)


def _forward_of(net: Any) -> Callable[..., Tensor]:
    def forward(
        hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Maps hidden_states [1, rows, hidden] to the same shape."""
        sequences: PackedRows | SlicedRows = arguments[SEQUENCES]
        unshared = None
        if isinstance(sequences, SlicedRows):  # a state is computed for each sample
            assert (unshared := sequences.unshared) is not None
            lengths = unshared.lengths
        else:
            lengths = sequences.lengths
        kernel = net.conv_kernel_size
        packed = sequences.once("delta net", lambda: packed_states(lengths, kernel, hidden_states.device))
        projected = _projected(net, hidden_states)
        if unshared is not None:
            projected = tuple(map(unshared.spread, projected))
        repeats = torch.is_grad_enabled() and any(kind.requires_grad for kind in projected)
        heads: Tensor = (
            checkpoint(_heads, net, packed, *projected, use_reentrant=False)
            if repeats
            else _heads(net, packed, *projected)
        )
        heads = heads if unshared is None else unshared.gathered(heads)
        output: Tensor = net.out_proj(heads[None])
        return output

    return forward


def _projected(net: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Returns the convolution's input, and per head the gate [heads, value_dim], the inputs' weights and the state's
    decays [heads]. All have a first dimension of rows."""
    if not hasattr(net, "in_proj_qkvz"):
        of_rows = (net.in_proj_qkv(hidden), net.in_proj_z(hidden), net.in_proj_b(hidden), net.in_proj_a(hidden))
        mixed, gate, weights, decays = (kind[0] for kind in of_rows)
        return mixed, gate.unflatten(-1, (-1, net.head_v_dim)), weights, decays
    turns = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
    queries, keys, values, gate, weights, decays = (kind[0] for kind in turns)
    return torch.cat([kind.flatten(1) for kind in (queries, keys, values)], dim=-1), gate, weights, decays


def _heads(net: Any, packed: PackedStates, mixed: Tensor, gate: Tensor, weights: Tensor, decays: Tensor) -> Tensor:
    """Returns the heads' outputs, [rows, all values].

    Parameters are read here, so FSDP gathers them again before the recomputation.
    """
    convolved, _ = convolve(mixed, net.conv1d.weight[:, 0], packed)
    sizes = ((net.key_dim, net.head_k_dim), (net.key_dim, net.head_k_dim), (net.value_dim, net.head_v_dim))
    queries, keys, values = (
        part.unflatten(-1, (-1, size))
        for part, (_, size) in zip(convolved.split([whole for whole, _ in sizes], dim=-1), sizes, strict=True)
    )
    taken, kept = gates(weights, decays, net.A_log, net.dt_bias)
    heads, _ = gated_delta_rule(queries, keys, values, taken, kept, packed)
    return gated_norm(heads, gate, net.norm.weight, net.layer_norm_epsilon).flatten(1)


# Fused kernels in transformers' models.
#
# Families in transformers have copies of Llama's modules. A copy with the same code is computed by fused kernels.


def compute_fused(module: torch.nn.Module, made_again: Collection[RecomputedModule] = ()) -> None:
    """Makes norms, rotations and gated MLPs in `module` use fused kernels on devices that have them.

    With `layernorm` or `activation` backward makes the outputs of norms or of gated activations again, for the products
    after them.
    """
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    has_norms, has_gates = (name in made_again for name in ("layernorm", "activation"))
    for part in cast(Iterable[Any], module.modules()):
        kind = type(part)
        if kind is torch.nn.Linear and made_again:
            part.forward = _product_of(part.forward)
        elif _same_code(kind.forward, LlamaRMSNorm.forward):
            part.forward = _norm_of(part, part.forward, part.variance_epsilon, 0.0, has_norms)
        elif _same_code(kind.forward, Gemma2RMSNorm.forward) and _same_code(kind._norm, Gemma2RMSNorm._norm):
            part.forward = _norm_of(part, part.forward, part.eps, 1.0, has_norms)
        elif _same_code(kind.forward, LlamaMLP.forward):
            gelu = partial(F.gelu, approximate="tanh")
            if _computes(part.act_fn, F.silu) or _computes(part.act_fn, gelu):
                part.forward = _gated_mlp_of(part, part.forward, _computes(part.act_fn, gelu), has_gates)
        _rotate_fused(sys.modules[kind.__module__])


def _same_code(function: Any, other: Any) -> bool:
    one, two = (_code_of(x) for x in (function, other))
    return one is not None and one == two


def _code_of(function: Any) -> object:
    """Returns what a function does, without its documentation."""
    code = getattr(unwrap(function), "__code__", None)
    if code is None:
        return None
    numbers = tuple(constant for constant in code.co_consts if not isinstance(constant, str))
    return code.co_code, code.co_names, code.co_varnames, numbers


def _computes(activation: Any, function: Callable[[Tensor], Tensor]) -> bool:
    points = torch.linspace(-4, 4, 9)
    return torch.equal(activation(points), function(points))


def _product_of(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with MadeAgain(x):
            return plain(x)

    return forward


def _norm_of(
    norm: Any, plain: Callable[..., Tensor], eps: float, offset: float, is_made_again: bool
) -> Callable[..., Tensor]:
    def normed_of(hidden_states: Tensor) -> Tensor:
        kernels = fused_kernels_for(hidden_states)
        if kernels is None:
            return plain(hidden_states)
        normed: Tensor = kernels.rms_norm(hidden_states, norm.weight, eps, offset)
        return normed.to(hidden_states.dtype) if offset else normed

    def forward(hidden_states: Tensor) -> Tensor:
        return with_recipe(normed_of(hidden_states), normed_of, hidden_states)

    return forward if is_made_again else normed_of


def _gated_mlp_of(mlp: Any, plain: Callable[..., Tensor], is_gelu: bool, is_made_again: bool) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        kernels = fused_kernels_for(x)
        if kernels is None:
            return plain(x)
        activate, factors = partial(kernels.gated_product, is_gelu=is_gelu), (mlp.gate_proj(x), mlp.up_proj(x))
        product: Tensor = activate(*factors)
        output: Tensor = mlp.down_proj(with_recipe(product, activate, *factors) if is_made_again else product)
        return output

    return forward


ROTATION = "apply_rotary_pos_emb"
"""Name of the function that a family's attention looks up in its module."""


def _rotate_fused(family: Any) -> None:
    """Replaces the rotation in a module of transformers, unless its code differs from Llama's."""
    from transformers.models.llama import modeling_llama

    plain: Any = getattr(family, ROTATION, None)
    names = (ROTATION, "rotate_half")
    copies = all(_same_code(getattr(family, name, None), getattr(modeling_llama, name)) for name in names)
    if not copies or hasattr(plain, "by_kernels"):
        return

    @wraps(plain)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys [1, heads, rows, head_dim]."""
        kernels = fused_kernels_for(q)
        if kernels is None or unsqueeze_dim != 1 or len(q) != 1 or len(cos) != 1:
            return cast(tuple[Tensor, Tensor], plain(q, k, cos, sin, unsqueeze_dim))
        rows = (x.squeeze(0).transpose(0, 1) for x in (q, k))
        turn = kernels.Turn(cos.squeeze(0), sin.squeeze(0), cos.size(-1) // 2)
        queries, keys = (x.transpose(0, 1)[None] for x in kernels.turned_pair(*rows, turn))
        return queries, keys

    rotated.by_kernels = True  # type: ignore[attr-defined]
    setattr(family, ROTATION, rotated)
