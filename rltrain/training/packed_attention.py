"""Causal attention over packed sequences, by torch's kernels or block by block."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import attend, attend_packed, attends_packed, sees
from rltrain.models.flops import SCORES_AT_ONCE

# Blockwise causal attention with softcap and sinks, beyond the options of torch's kernels.
#
# Only the scores of one block of queries are in memory. As in FlashAttention, backward recomputes them from queries,
# keys, values, outputs and each query's log-sum-exp (Dao 2023, arXiv:2307.08691, section 3.1).

LEAST_TOKENS = 16
"""Least number of queries per sequence in a block, for any number of sequences."""


def attend_blockwise(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block_tokens: int | None = None,
) -> Tensor:
    """Returns attention [sequences, heads, n, head_dim of values].

    `queries` are [sequences, heads, n, head_dim], `keys` and `values` [sequences, kv_heads, n, ...].

    - `scale` multiplies the scores. None: 1 / sqrt(head_dim).
    - `window` is the number of tokens that a token attends to, including itself.
    - `softcap` turns scores x into softcap * tanh(x / softcap).
    - `sinks` [heads] are one more score per head, without a value.
    - `block_tokens` is the number of queries at a time. None: as many as have SCORES_AT_ONCE scores.
    """
    scale = queries.size(-1) ** -0.5 if scale is None else scale
    if block_tokens is None:
        block_tokens = max(SCORES_AT_ONCE // (queries.shape[:3].numel() or 1), window or 0, LEAST_TOKENS)
    attended: Tensor = _Blockwise.apply(queries, keys, values, sinks, scale, window, softcap, block_tokens)
    return attended


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tokens: int,
    ) -> Tensor:
        attended = queries.new_empty(*queries.shape[:-1], values.size(-1))
        sums = queries.new_empty(queries.shape[:-1], dtype=_wide(queries))
        ctx.settings = scale, window, softcap, block_tokens
        for rows, columns in _blocks(queries.size(2), block_tokens, window):
            capped = _capped_scores(queries[:, :, rows], keys[:, :, columns], scale, softcap)
            scores = _masked(capped, rows, columns, window)
            sums[:, :, rows] = scores.logsumexp(-1)
            if sinks is not None:
                sums[:, :, rows] = sums[:, :, rows].logaddexp(sinks.to(sums.dtype)[:, None])
            shares = (scores - sums[:, :, rows, None]).exp_().to(values.dtype)
            attended[:, :, rows] = (_by_group(shares, keys) @ values[:, :, columns]).view_as(attended[:, :, rows])
        ctx.save_for_backward(queries, keys, values, sinks, attended, sums)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, sinks, attended, sums = ctx.saved_tensors
        scale, window, softcap, block_tokens = ctx.settings
        given, wide = gradients[0], sums.dtype
        along = (given.to(wide) * attended.to(wide)).sum(-1)
        of_queries = torch.empty_like(queries)
        of_keys, of_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        for rows, columns in _blocks(queries.size(2), block_tokens, window):
            capped = _capped_scores(queries[:, :, rows], keys[:, :, columns], scale, softcap)
            shares = (_masked(capped, rows, columns, window) - sums[:, :, rows, None]).exp_()
            rows_given = _by_group(given[:, :, rows], keys)
            of_shares = (rows_given @ values[:, :, columns].mT).view_as(shares).to(wide)
            of_scores = shares * (of_shares - along[:, :, rows, None])
            if softcap is not None:
                of_scores *= 1 - (capped / softcap).square()
            of_scores = _by_group(of_scores.mul_(scale).to(queries.dtype), keys)
            of_queries[:, :, rows] = (of_scores @ keys[:, :, columns]).view_as(queries[:, :, rows])
            of_keys[:, :, columns] += of_scores.mT @ _by_group(queries[:, :, rows], keys)
            of_values[:, :, columns] += _by_group(shares.to(values.dtype), keys).mT @ rows_given
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(wide)[:, None] - sums).exp() * along).sum((0, 2)).to(sinks.dtype)
        return of_queries, of_keys.to(keys.dtype), of_values.to(values.dtype), of_sinks, None, None, None, None


def _blocks(length: int, block_tokens: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields slices of queries, each with the slice of its keys."""
    for first in range(0, length, block_tokens):
        last = min(first + block_tokens, length)
        yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _by_group(of_heads: Tensor, keys: Tensor) -> Tensor:
    """Reshapes [sequences, heads, n, m] to [sequences, kv_heads, heads of each * n, m]."""
    return of_heads.reshape(len(keys), keys.size(1), -1, of_heads.size(-1))


def _capped_scores(queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns unmasked scores [sequences, heads, n, m], with softcap, in fp32 or wider."""
    scores = (_by_group(queries, keys) @ keys.mT).to(_wide(queries)) * scale
    scores = scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
    return scores.view(*queries.shape[:-1], keys.size(2))


def _masked(scores: Tensor, rows: slice, columns: slice, window: int | None) -> Tensor:
    queries, keys = (torch.arange(part.start, part.stop, device=scores.device) for part in (rows, columns))
    return scores.masked_fill(~sees(queries, keys, window), -torch.inf)


# Causal attention within packed sequences, by torch's kernels.

# Sequences share a padded batch if the shortest has at least this fraction of the longest's length. Attention over
# padding costs up to the inverse square. A further batch costs a few kernel launches.
SHORTEST_FRACTION = 0.6
SHORT_TOKENS = 128  # below this width launches cost more than padding at any fraction

Derived = TypeVar("Derived")


@dataclass
class RowsOfLayers:
    """The rows of a micro-batch, as all layers see them."""

    positions: Tensor = field(kw_only=True)
    """Position of each row in its sequence, [rows of this rank]."""
    derived: dict[str, Any] = field(kw_only=True, default_factory=dict)
    """Cache of `once`."""

    def once(self, name: str, make: Callable[[], Derived]) -> Derived:
        """Returns the cached result of `make`, shared by all layers of the micro-batch."""
        if name not in self.derived:
            self.derived[name] = make()
        derived: Derived = self.derived[name]
        return derived


@dataclass
class PackedRows(RowsOfLayers):
    """The places of packed sequences, for kernels on packed rows and for kernels on padded batches."""

    pad_index: Tensor = field(kw_only=True)
    """Token of each slot of the padded batches, [slots]. Padding repeats its sequence's last token."""
    unpad_index: Tensor = field(kw_only=True)
    """Slot of each token, [tokens]."""
    batches: tuple[tuple[int, int], ...] = field(kw_only=True)
    """(sequences, width) of each padded batch, in the order of their slots."""
    boundaries: Tensor = field(kw_only=True)
    """Starts of the sequences and the end of the last one, int32 [sequences + 1]."""
    longest: int = field(kw_only=True)
    """Length of the longest sequence in tokens."""
    lengths: tuple[int, ...] = field(kw_only=True)
    """Lengths of the sequences, in order."""


Rows = TypeVar("Rows", bound=PackedRows)


def packed_rows(
    lengths: Sequence[int],
    device: torch.device,
    kind: type[Rows],
    fraction: float = SHORTEST_FRACTION,
    short_tokens: int = SHORT_TOKENS,
) -> Rows:
    """Builds padded batches of packed sequences with similar lengths, as a `kind` of PackedRows.

    `fraction` and `short_tokens` are those of similar_lengths.
    """
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
    pad_parts, slot_of_start, batches, num_slots = [], torch.empty_like(sizes), [], 0
    for members in similar_lengths(sizes, fraction, short_tokens):
        width = int(sizes[members].max())
        slot_of_start[members] = num_slots + width * torch.arange(len(members))
        within = torch.arange(width).minimum(sizes[members, None] - 1)
        pad_parts.append((starts[members, None] + within).flatten())
        batches.append((len(members), width))
        num_slots += len(members) * width
    return kind(
        positions=positions.to(device),
        pad_index=torch.cat(pad_parts).to(device),
        unpad_index=(torch.repeat_interleave(slot_of_start, sizes) + positions).to(device),
        batches=tuple(batches),
        boundaries=boundaries_of(lengths, device),
        longest=max(lengths),
        lengths=tuple(lengths),
    )


def boundaries_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the starts of the sequences and the end of the last one, int32 [sequences + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def similar_lengths(
    sizes: Tensor, fraction: float = SHORTEST_FRACTION, short_tokens: int = SHORT_TOKENS
) -> list[Tensor]:
    """Returns groups of sequence numbers with similar lengths, the longest first.

    The shortest of a group has at least `fraction` of the longest's length, if that is above `short_tokens`.
    """
    descending, order = sizes.sort(descending=True, stable=True)
    groups, first = [], 0
    while first < len(order):
        longest = int(descending[first])
        shortest = 0 if longest <= short_tokens else longest * fraction
        last = int((descending >= shortest).sum())
        groups.append(order[first:last])
        first = last
    return groups


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [tokens, heads, head_dim of value] of query [tokens, heads, head_dim] and key and value
    [tokens, kv_heads, ...].

    All sequences are computed at once if the kernel allows it, else in padded batches. `scale`, `window`, `softcap` and
    `sinks` are those of attend_blockwise.
    """
    if softcap is None and sinks is None and attends_packed(query, key, value):
        return attend_packed(query, key, value, packed.boundaries, packed.longest, scale=scale, window=window)
    padded = [_Reindex.apply(x, packed.pad_index, packed.unpad_index) for x in (query, key, value)]
    outputs, first = [], 0
    for num_sequences, width in packed.batches:
        slots = slice(first, first + num_sequences * width)
        q, k, v = (x[slots].view(num_sequences, width, *x.shape[1:]).transpose(1, 2) for x in padded)
        # Padding needs no mask: it comes after the real tokens, and causal attention never looks ahead.
        if softcap is None and sinks is None:
            attended = _attend_padded(q, k, v, scale, window)
        else:
            attended = attend_blockwise(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        first = slots.stop
    slots_out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return slots_out.index_select(0, packed.unpad_index)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    width, bias = query.size(2), None
    if window is not None and window < width:
        places = torch.arange(width, device=query.device)
        bias = sees(places, places, window)
    return attend(query, key, value, bias, causal=bias is None, scale=scale)


class _Reindex(torch.autograd.Function):
    """Selects rows of `x` by `pad_index`. Its gradient is a gather too, because rows of padding get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        return x.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (unpad_index,) = ctx.saved_tensors
        return gradients[0].index_select(0, unpad_index), None, None
