"""Causal attention over packed sequences, by torch's kernels or block by block."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import attend, attend_packed, attends_packed, sees
from rltrain.models.flops import SCORES_AT_ONCE
from rltrain.training.packing import WHOLE, ContextShare
from rltrain.training.prefix_tree import PrefixTree

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


def packed_rows(lengths: Sequence[int], device: torch.device, kind: type[Rows]) -> Rows:
    """Builds padded batches of packed sequences with similar lengths, as a `kind` of PackedRows."""
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


def similar_lengths(sizes: Tensor) -> list[Tensor]:
    """Returns groups of sequence numbers with similar lengths, the longest first."""
    descending, order = sizes.sort(descending=True, stable=True)
    groups, first = [], 0
    while first < len(order):
        longest = int(descending[first])
        shortest = 0 if longest <= SHORT_TOKENS else longest * SHORTEST_FRACTION
        last = int((descending >= shortest).sum())
        groups.append(order[first:last])
        first = last
    return groups


# Slices of sequences, whose queries are the last of their keys.


@dataclass(frozen=True)
class SliceBatch:
    """Slices with similar numbers of keys, padded to one shape [slices, width of tokens, width of keys]."""

    rows: Tensor
    """Row in each slot, [slices, tokens]. A slice's last row fills its padding."""
    key_rows: Tensor
    """Row of each key, [slices, keys]."""
    num_keys: Tensor
    """Number of keys that a token attends to, [slices, 1, tokens, 1]."""

    def sees(self, window: int | None) -> Tensor:
        """Returns whether a token attends to a key, [slices, 1, tokens, keys]."""
        distance = self.num_keys - 1 - torch.arange(self.key_rows.size(1), device=self.rows.device)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass
class SlicedRows(RowsOfLayers):
    """Slices of sequences, and the keys of each: its sequence from the beginning up to the slice's last token.

    A row may be a key of several slices. `key_rows` may number other rows than queries do, those of several ranks.
    """

    key_rows: Tensor = field(kw_only=True)
    """Row of each key, slice after slice, [keys]."""
    boundaries: Tensor = field(kw_only=True)
    """Starts of the slices among the rows and the end of the last one, int32 [slices + 1]."""
    key_boundaries: Tensor = field(kw_only=True)
    """Starts of the slices' keys in `key_rows` and the end of the last ones, int32 [slices + 1]."""
    num_rows: Tensor = field(kw_only=True)
    num_keys: Tensor = field(kw_only=True)
    """Number of keys of each slice, [slices], on the host. `num_rows` is the number of its rows."""
    unshared: "UnsharedTokens | None" = field(kw_only=True, default=None)
    """The tokens of all samples, if they share rows."""

    def padded(self) -> tuple[list[SliceBatch], Tensor]:
        """Returns padded batches of the slices, and the slot of each row in the concatenated batches, [rows]."""
        return self.once("padded slices", self._padded)

    def _padded(self) -> tuple[list[SliceBatch], Tensor]:
        num_rows, num_keys, device = self.num_rows, self.num_keys, self.positions.device
        first, first_key = (x.cumsum(0) - x for x in (num_rows, num_keys))
        batches, slot_of_row, num_slots = [], torch.empty(int(num_rows.sum()), dtype=torch.int64), 0
        for members in similar_lengths(num_keys):
            of_slices, of_keys = num_rows[members, None], num_keys[members, None]
            token = torch.arange(int(of_slices.max())).minimum(of_slices - 1)
            key = torch.arange(int(of_keys.max()))
            rows, seen = first[members, None] + token, of_keys - of_slices + token + 1
            batch = SliceBatch(
                rows=rows.to(device),
                key_rows=self.key_rows[(first_key[members, None] + key.minimum(of_keys - 1)).to(device)],
                num_keys=seen.to(device)[:, None, :, None],
            )
            batches.append(batch)
            # A row in several slots may use any of them: all have the same result.
            slot_of_row[rows.flatten()] = num_slots + torch.arange(rows.numel())
            num_slots += rows.numel()
        return batches, slot_of_row.to(device)


Slices = TypeVar("Slices", bound=SlicedRows)


def sliced_rows(
    num_rows: Tensor, num_keys: Tensor, key_rows: Tensor, positions: Tensor, kind: type[Slices], **further: Any
) -> Slices:
    """Builds a `kind` of SlicedRows. The numbers are on the host, key rows and positions on the device."""
    device = positions.device
    return kind(
        positions=positions,
        key_rows=key_rows,
        boundaries=boundaries_of(num_rows.tolist(), device),
        key_boundaries=boundaries_of(num_keys.tolist(), device),
        num_rows=num_rows,
        num_keys=num_keys,
        **further,
    )


def attend_slices(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slices: SlicedRows,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [rows, heads, head_dim of values] of query [rows, heads, head_dim].

    `keys` and `values` [rows of all keys, kv_heads, ...] are selected by `key_rows`. `scale`, `window`, `softcap` and
    `sinks` are those of attend_blockwise.
    """
    if softcap is None and sinks is None and attends_packed(query, keys, values):
        return _attend_selected(query, keys, values, slices, scale, window)
    batches, slot_of_row = slices.padded()
    outputs = []
    for batch in batches:
        q, k, v = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((query, batch.rows), (keys, batch.key_rows), (values, batch.key_rows))
        )
        of_heads = None if sinks is None else sinks[:, None, None]
        attended = attend(q, k, v, batch.sees(window), scale=scale, softcap=softcap, sinks=of_heads)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, slot_of_row)


def _attend_selected(
    query: Tensor, keys: Tensor, values: Tensor, slices: SlicedRows, scale: float | None, window: int | None
) -> Tensor:
    """Computes `attend_slices` in one launch. Backward selects the keys and values again, so no copies are kept."""
    of_keys, of_values = (x.index_select(0, slices.key_rows) for x in (keys, values))
    sources = {(copy.data_ptr(), copy.shape): x.detach() for copy, x in ((of_keys, keys), (of_values, values))}

    def pack(x: Tensor) -> Tensor | tuple[Tensor]:
        source = sources.get((x.data_ptr(), x.shape))
        return x if source is None else (source,)

    def unpack(kept: Tensor | tuple[Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].index_select(0, slices.key_rows)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return attend_packed(
            query,
            of_keys,
            of_values,
            slices.boundaries,
            int(slices.num_rows.max()),
            key_boundaries=slices.key_boundaries,
            longest_keys=int(slices.num_keys.max()),
            scale=scale,
            window=window,
        )


# Rows of samples that share prefixes.


@dataclass(frozen=True)
class UnsharedTokens:
    """The tokens of samples that share rows, followed by padding, for what is computed for each sample."""

    lengths: tuple[int, ...]
    """Lengths of the samples and of pieces of padding."""
    row_of_token: Tensor
    token_of_row: Tensor
    """A token of each row. A shared row has several, with equal results."""

    def spread(self, rows: Tensor) -> Tensor:
        """Returns [tokens, ...] of [rows, ...]. Gradients of a shared row are added up in a fixed order."""
        return rows[self.row_of_token]

    def gathered(self, tokens: Tensor) -> Tensor:
        """Returns [rows, ...] of [tokens, ...], one of the equal results of each row."""
        return tokens[self.token_of_row]


def tree_rows(
    tree: PrefixTree,
    segments: Sequence[int],
    sample_lengths: Sequence[int],
    kind: type[Slices],
    device: torch.device,
    share: ContextShare = WHOLE,
    row_of_place: Tensor | None = None,
    **further: Any,
) -> Slices:
    """Builds a `kind` of SlicedRows for this rank's rows of a tree. A slice is a run, or the part of it on this rank.

    `segments` are the lengths of the tree's runs and of the padding after them. The keys are those of `row_of_place`,
    which has a row for each place in the tree, if several ranks share it.
    """
    padding = segments[len(tree.lengths) :]
    padding_starts = torch.tensor([tree.num_rows, *padding[:-1]]).cumsum(0).tolist() if padding else []
    starts = [*tree.starts, *padding_starts]
    paths = [*tree.paths(), *(torch.arange(one, one + size) for one, size in zip(padding_starts, padding, strict=True))]
    positions = torch.cat([tree.positions, *(torch.arange(size) for size in padding)])
    num_rows, key_places, own = list[int](), list[Tensor](), list[Tensor]()
    for first, last in _places_of_rank(sum(segments), share):
        own.append(positions[first:last])
        for start, length, path in zip(starts, segments, paths, strict=True):
            begin, end = max(first, start), min(last, start + length)
            if begin < end:
                num_rows.append(end - begin)
                key_places.append(path[: len(path) - (start + length - end)])
    num_keys = torch.tensor([len(places) for places in key_places])
    places = torch.cat(key_places).to(device)
    return sliced_rows(
        torch.tensor(num_rows),
        num_keys,
        places if row_of_place is None else row_of_place[places],
        torch.cat(own).to(device),
        kind,
        unshared=_unshared(tree, padding, sample_lengths, device),
        **further,
    )


def _places_of_rank(num_places: int, share: ContextShare) -> list[tuple[int, int]]:
    if share.size == 1:
        return [(0, num_places)]
    each = num_places // (2 * share.size)
    return [(number * each, (number + 1) * each) for number in share.slices()]


def _unshared(
    tree: PrefixTree, padding: Sequence[int], sample_lengths: Sequence[int], device: torch.device
) -> UnsharedTokens:
    further = torch.arange(sum(padding))
    return UnsharedTokens(
        lengths=(*sample_lengths, *padding),
        row_of_token=torch.cat([tree.row_of_token, tree.num_rows + further]).to(device),
        token_of_row=torch.cat([tree.token_of_row, len(tree.row_of_token) + further]).to(device),
    )


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows | SlicedRows,
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
    if isinstance(packed, SlicedRows):
        return attend_slices(query, key, value, packed, scale, window, softcap, sinks)
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
