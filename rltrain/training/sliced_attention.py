"""Causal attention of slices of sequences to all tokens before them: a rank's slices, or runs of a prefix tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import attend, attend_packed, attends_packed
from rltrain.training.packed_attention import (
    PackedRows,
    RowsOfLayers,
    attend_sequences,
    boundaries_of,
    packed_rows,
    similar_lengths,
)
from rltrain.training.packing import WHOLE, ContextShare
from rltrain.training.prefix_tree import PrefixTree, ranges
from rltrain.training.recipes import MadeAgain, with_recipe

# Slices of sequences, whose queries are the last of their keys.

FRACTION_OF_KEYS = 0.75
"""The `fraction` of similar_lengths for slices and runs. Padding costs more here than for sequences, because it repeats
all keys of a slice."""
SHORT_RUN_TOKENS = 32
"""The `short_tokens` of similar_lengths for runs of a tree. Most of them are short."""


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
    blocks: "TreeBlocks | None" = field(kw_only=True, default=None)
    """The blocks of a whole tree, whose rows are also the keys."""

    @property
    def copies_keys(self) -> bool:
        """Whether there are so many more keys than rows that blocks take less time than copies of keys."""
        return len(self.key_rows) > LEAST_COPIES * len(self.positions)

    def padded(self) -> tuple[list[SliceBatch], Tensor]:
        """Returns padded batches of the slices, and the slot of each row in the concatenated batches, [rows]."""
        return self.once("padded slices", self._padded)

    def _padded(self) -> tuple[list[SliceBatch], Tensor]:
        num_rows, num_keys, device = self.num_rows, self.num_keys, self.positions.device
        first, first_key = (x.cumsum(0) - x for x in (num_rows, num_keys))
        batches, slot_of_row, num_slots = [], torch.empty(int(num_rows.sum()), dtype=torch.int64), 0
        for members in similar_lengths(num_keys, FRACTION_OF_KEYS):
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


LEAST_COPIES = 2.5
"""Keys per row from which a tree's attention goes by blocks."""

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
    width, missing = values.size(-1), keys.size(-1) - values.size(-1)
    if softcap is None and sinks is None and missing >= 0 and attends_packed(query, keys, keys):
        # The kernel takes one size of heads. Zeros at the end of latent attention's values give zeros there.
        wide = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return _attend_selected(query, keys, wide, slices, scale, window)[..., :width]
    if softcap is None and sinks is None and window is None and _takes_blocks(query, keys, values, slices):
        by_head = query.size(-1) ** -0.5 if scale is None else scale
        attended: Tensor = _TreeAttention.apply(query, keys, values, slices.blocks, by_head)
        return attended
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

    def selected(x: Tensor) -> Tensor:
        return x.index_select(0, slices.key_rows)

    of_keys, of_values = (with_recipe(selected(x), selected, x) for x in (keys, values))
    with MadeAgain(of_keys, of_values):
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


# Attention over the rows of a tree on CPUs, block by block, without copies of keys.
#
# The rows are in depth-first order. So the rows that attend to all of a run are those after it, up to the end of its
# descendants: one block of queries and one of keys. What remains are the runs themselves, with a causal mask. They are
# computed together, padded. Outputs of blocks are merged by their log-sum-exps. The backward of each block takes the
# merged ones, as in ring attention (Liu et al. 2023, arXiv:2310.01889).


@dataclass(frozen=True)
class TreeBlocks:
    """The blocks of attention over the rows of a tree."""

    whole: tuple[tuple[slice, slice], ...]
    """Rows of queries and of keys, where all attend to all."""
    runs: PackedRows
    """The runs, which attend to themselves causally. They cover all rows."""

    @classmethod
    def of(
        cls, parents: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> "TreeBlocks":
        """Returns the blocks of runs in depth-first order. `parents` are the runs before them, or -1."""
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        ends = [*stops]
        for number in reversed(range(len(ends))):
            if parents[number] >= 0:
                ends[parents[number]] = max(ends[parents[number]], ends[number])
        whole = [
            (slice(stop, end), slice(start, stop))
            for start, stop, end in zip(starts, stops, ends, strict=True)
            if end > stop
        ]
        return cls(tuple(whole), packed_rows(lengths, device, PackedRows, FRACTION_OF_KEYS, SHORT_RUN_TOKENS))

    def batches(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields padded batches of runs: the row in each slot, False for slots of padding, and the number of runs. A
        run's last row fills its padding."""
        is_row, first = self.runs.once("is row", self._is_row), 0
        for count, width in self.runs.batches:
            slots = slice(first, first + count * width)
            yield self.runs.pad_index[slots], is_row[slots], count
            first = slots.stop

    def _is_row(self) -> Tensor:
        rows = self.runs.pad_index
        return self.runs.unpad_index[rows] == torch.arange(len(rows), device=rows.device)


class _TreeAttention(torch.autograd.Function):
    """Attention [rows, heads, head_dim] of query [rows, heads, head_dim] and key and value [rows, kv_heads, head_dim]
    within the blocks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: TreeBlocks, scale: float) -> Tensor:
        attends = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = []
        for rows, _, count in blocks.batches():
            of_runs = _of_runs(query, key, value, rows, count)
            attended, sums = attends(*of_runs, 0.0, is_causal=True, scale=scale)
            found.append((attended.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1)))
        attended, sums = (
            torch.cat(parts).index_select(0, blocks.runs.unpad_index) for parts in zip(*found, strict=True)
        )
        for own, keys in blocks.whole:
            of_block, of_sums = attends(*_of_block(query, key, value, own, keys), 0.0, is_causal=False, scale=scale)
            of_block, of_sums = (_rows_of_block(x, query[own]) for x in (of_block, of_sums[..., None]))
            merged = sums[own, :, None].logaddexp(of_sums)
            attended[own] = attended[own] * (sums[own, :, None] - merged).exp() + of_block * (of_sums - merged).exp()
            sums[own] = merged[..., 0]
        ctx.save_for_backward(query, key, value, attended, sums)
        ctx.settings = blocks, scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        backward_of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, attended, sums = ctx.saved_tensors
        (given,), (blocks, scale) = gradients, ctx.settings
        found = []
        for rows, is_row, count in blocks.batches():
            of_runs = _of_runs(query, key, value, rows, count)
            of_given = _padded(given, rows, count) * is_row.view(count, 1, -1, 1)
            of_sums = _padded(sums[..., None], rows, count)[..., 0]
            made = backward_of(
                of_given, *of_runs, _padded(attended, rows, count), of_sums, 0.0, is_causal=True, scale=scale
            )
            found.append([x.transpose(1, 2).flatten(0, 1) for x in made])
        of_query, of_key, of_value = (
            torch.cat(parts).index_select(0, blocks.runs.unpad_index) for parts in zip(*found, strict=True)
        )
        of_key, of_value = (x.unflatten(1, (key.size(1), -1)).sum(2) for x in (of_key, of_value))
        for own, keys in blocks.whole:
            of_block = _of_block(query, key, value, own, keys)
            merged = [_queries_of_block(x[own], key.size(1)) for x in (given, attended, sums[..., None])]
            made = backward_of(merged[0], *of_block, merged[1], merged[2][..., 0], 0.0, is_causal=False, scale=scale)
            of_query[own] += _rows_of_block(made[0], query[own])
            of_key[keys] += made[1][0].transpose(0, 1)
            of_value[keys] += made[2][0].transpose(0, 1)
        return of_query, of_key, of_value, None, None


def _padded(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Selects [runs, heads, width, n] from [rows, heads, n]."""
    return x.index_select(0, rows).unflatten(0, (count, -1)).transpose(1, 2)


def _of_runs(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, count: int) -> list[Tensor]:
    """Returns queries, keys and values of padded runs, [runs, heads, width, head_dim] each."""
    copies = query.size(1) // key.size(1)
    repeated = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    return [_padded(x, rows, count) for x in (query, *repeated)]


def _of_block(query: Tensor, key: Tensor, value: Tensor, rows: slice, keys: slice) -> list[Tensor]:
    """Returns queries [1, kv_heads, queries of each * rows, head_dim] and keys and values [1, kv_heads, keys, head_dim]
    of a block."""
    return [_queries_of_block(query[rows], key.size(1)), *(x[keys].transpose(0, 1)[None] for x in (key, value))]


def _queries_of_block(of_rows: Tensor, num_kv_heads: int) -> Tensor:
    """Turns [rows, heads, n] into [1, kv_heads, queries of each * rows, n]."""
    return of_rows.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)[None]


def _rows_of_block(of_block: Tensor, like: Tensor) -> Tensor:
    """Turns [1, kv_heads, queries of each * rows, n] into [rows, heads, n], for rows and heads as in `like`."""
    return of_block[0].unflatten(1, (-1, len(like))).permute(2, 0, 1, 3).reshape(*like.shape[:2], -1)


def _takes_blocks(query: Tensor, keys: Tensor, values: Tensor, slices: SlicedRows) -> bool:
    """Returns whether a tree's attention is computed by blocks."""
    is_taken = query.device.type == "cpu" and query.size(-1) == keys.size(-1) == values.size(-1)
    return is_taken and slices.blocks is not None and slices.copies_keys


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
    starts, parents = [*tree.starts, *padding_starts], [*tree.parents, *[-1] * len(padding)]
    paths = [*tree.paths(), *([piece] for piece in zip(padding_starts, padding, strict=True))]
    positions = torch.cat([tree.positions, *(torch.arange(size) for size in padding)])
    num_rows, num_keys, pieces, own = list[int](), list[int](), list[tuple[int, int]](), list[Tensor]()
    for first, last in _places_of_rank(sum(segments), share):
        own.append(positions[first:last])
        for start, length, path in zip(starts, segments, paths, strict=True):
            begin, end = max(first, start), min(last, start + length)
            if begin < end:
                of_slice = [*path[:-1], (start, end - start)]
                num_rows.append(end - begin)
                num_keys.append(sum(size for _, size in of_slice))
                pieces += of_slice
    first_places, sizes = torch.tensor(pieces).T
    places = ranges(first_places, sizes).to(device)
    return sliced_rows(
        torch.tensor(num_rows),
        torch.tensor(num_keys),
        places if row_of_place is None else row_of_place[places],
        torch.cat(own).to(device),
        kind,
        unshared=_unshared(tree, padding, sample_lengths, device),
        blocks=None if share.size > 1 else TreeBlocks.of(parents, starts, segments, device),
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
    rows: PackedRows | SlicedRows,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention [rows, heads, head_dim of value] of query [rows, heads, head_dim] and key and value [rows,
    kv_heads, ...], within packed sequences or over a prefix tree.

    `scale`, `window`, `softcap` and `sinks` are those of attend_blockwise.
    """
    attend = attend_slices if isinstance(rows, SlicedRows) else attend_sequences
    return attend(query, key, value, rows, scale, window, softcap, sinks)  # type: ignore[arg-type]
