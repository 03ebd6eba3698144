"""Micro-batches: samples packed end to end, balanced by tokens, sliced for context parallelism."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.training.prefix_tree import LEAST_SAVED, PrefixTree, SortedSamples, ranges

# The tokens of packed sequences on each rank of context parallelism.
#
# Every sequence is padded and cut into equal slices, two per rank. Rank r has slice r from the front and slice r from
# the end. A token attends to all earlier tokens, so this gives every rank the same work in every sequence (Llama 3,
# arXiv:2407.21783, section 3.3.2). Transformer Engine cuts packed sequences in the same way.


@dataclass(frozen=True)
class ContextShare:
    """The part of every sequence on rank `rank` of `size` context-parallel ranks. A single rank has everything."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Padded lengths of sequences are multiples of this number."""
        return 2 * self.size if self.size > 1 else 1

    def slices(self) -> tuple[int, int]:
        """Returns the rank's two slice numbers out of 2 * size."""
        return self.rank, 2 * self.size - 1 - self.rank


WHOLE = ContextShare()


def places_of(lengths: Sequence[int], share: ContextShare) -> Tensor:
    """Returns the places of this rank's tokens in sequences of `lengths` tokens laid end to end, int64 [rows].

    Sequence by sequence, the rank's two slices follow each other. Lengths must be multiples of `share.multiple`.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    each, starts = sizes // (2 * share.size), sizes.cumsum(0) - sizes
    first = torch.stack([starts + number * each for number in share.slices()], dim=1)
    return ranges(first.flatten(), each.repeat_interleave(2))


def positions_of(lengths: Sequence[int], share: ContextShare) -> Tensor:
    """Returns the position of each token of `places_of` within its sequence, [rows]."""
    sizes = torch.tensor(lengths)
    return ranges(torch.zeros_like(sizes), sizes)[places_of(lengths, share)]


def places_of_all(lengths: Sequence[int], size: int) -> Tensor:
    """Returns `places_of` of all `size` context-parallel ranks, concatenated in rank order, int64 [tokens].

    Row i of a tensor gathered from these ranks is the token at place i of the result, an index into the sequences laid
    end to end. `lengths` are the padded lengths.
    """
    return torch.cat([places_of(lengths, ContextShare(rank, size)) for rank in range(size)])


def inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order))
    return result


# Micro-batches of packed samples, balanced by tokens.

LEFT_ON_HOST = frozenset({"routed_experts", "image_keys"})
"""Very large fields, and fields for the host. Of the former a rank moves only the part of its own layers to the device.
"""


@dataclass(frozen=True)
class Drawn:
    """The tokens some places after those of this rank's rows, in the same samples. They are sorted by these rows."""

    rows: Tensor
    """The row of the token some places before each token, [drawn]."""
    tokens: Tensor
    """Each token, [drawn]."""
    starts: Tensor
    """First of the tokens of each row, and their number, on the host, [rows + 1]."""


@dataclass(frozen=True)
class Slices:
    """A rank's rows, where rows are not the tokens in their order.

    Several ranks may share the samples. Then rows are tokens and padding. With shared prefixes a row may be a token of
    several samples.
    """

    token_of_row: Tensor
    """Token of each row of this rank, [rows]. A row of padding has an arbitrary token, a shared row one of its
    tokens."""
    row_of_token: Tensor
    """Row of each token among the rows of all ranks in rank order, [tokens]."""
    sample_of_row: Tensor
    """Sample of each row, [rows of this rank + padding after the last sample]. Padding has the number of samples
    instead. A shared row has one of its samples."""
    drawn: tuple[Drawn, ...] = ()
    """With shared prefixes: the tokens one place after this rank's rows, and with `PrefixTree.looks_ahead` those two
    places after."""


@dataclass(frozen=True)
class MicroBatch:
    """Some packed samples of a mini-batch.

    `experience` has all their tokens without padding, also those computed by other ranks. Padding follows the last
    sample. If several ranks share the samples, padding follows every sample.
    """

    experience: Experience
    token_index: Tensor
    """Index of each token in the mini-batch, [tokens], on the host."""
    padded_tokens: Tensor
    """Token ids computed by this rank, [rows + padding after the last sample], on the device."""
    lengths: tuple[int, ...]
    """Lengths of the samples in tokens."""
    segments: tuple[int, ...]
    """Lengths of the padded samples, followed by pieces of padding no longer than the longest sample. They cover the
    tokens of all ranks sharing the samples. With a tree they are the lengths of its runs and of the padding."""
    slices: Slices | None = None
    """This rank's slices. None: it computes all tokens, in their order."""
    tree: PrefixTree | None = None
    """The tree of the samples, if they share prefixes. Its rows are this micro-batch's rows."""

    @property
    def num_tokens(self) -> int:
        return self.experience.num_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows of the model's output on this rank, without padding after the last sample."""
        return self.num_tokens if self.slices is None else len(self.slices.token_of_row)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens computed by all ranks that share the samples, without padding."""
        return self.num_tokens if self.tree is None else self.tree.num_rows

    @property
    def computed(self) -> tuple[Sequence[int], Sequence[int]]:
        """Lengths of sequences, and of their beginnings that are not computed, because another sequence has them."""
        if self.tree is None:
            return self.lengths, ()
        depths = self.tree.depths
        return [depth + length for depth, length in zip(depths, self.tree.lengths, strict=True)], depths

    def rows_of(self, values: Tensor) -> Tensor:
        """Selects the values of this rank's tokens from `values` [tokens, ...]: shape [rows, ...]."""
        return values if self.slices is None else values[self.slices.token_of_row.to(values.device)]

    def rows_with(self, tokens: Tensor, share: ContextShare) -> Tensor:
        """Returns the rows of `tokens` [n] on this rank, or -1 for tokens of other ranks of the `share`. All are on the
        host.

        Of several tokens that share a row, one has it. The others have -1.
        """
        if self.slices is None:
            return tokens
        rows = self.rows_of_all(share)[tokens]
        if self.tree is not None:
            is_first = self.tree.token_of_row[self.tree.row_of_token[tokens]] == tokens
            rows = torch.where(is_first, rows, -1)
        return rows

    def rows_of_all(self, share: ContextShare) -> Tensor:
        """Returns the row of each token on this rank, or -1 if another rank of the `share` has it, [tokens] on the
        host."""
        assert self.slices is not None, "rows are the tokens"
        rows = self.slices.row_of_token.cpu() - share.rank * self.num_rows
        return torch.where((rows >= 0) & (rows < self.num_rows), rows, -1)


def pack(
    experience: Experience,
    max_tokens: int,
    *,
    device: torch.device,
    multiple_of: int = 1,
    equal_lengths: bool = False,
    count_multiple_of: int = 1,
    share: ContextShare = WHOLE,
    prefixes: SortedSamples | None = None,
) -> list[MicroBatch]:
    """Packs samples into micro-batches of at most `max_tokens` tokens before padding, on `device`.

    A longer sample has a micro-batch of its own. Every sample is in exactly one micro-batch, and samples keep their
    order. The samples of a pair stay together, and the limit applies to pairs.

    The rows of all ranks of a `share` are padded to a multiple of `multiple_of` tokens. With `equal_lengths` all
    micro-batches are padded to the longest. Their number is a multiple of `count_multiple_of`. If there are too few
    samples, some micro-batches have only padding.

    With `prefixes`, the sorted samples of `experience`, a prefix that several samples share is computed once. The limit
    then counts computed tokens, and samples with equal beginnings go together.

    A pure function: ranks with the same samples get the same micro-batches, each with its own share of the tokens.
    """
    members = _sample_bins(experience, max_tokens, count_multiple_of, prefixes)
    bins = [torch.tensor(samples, dtype=torch.int64) for samples in members]
    parts = [experience.select(samples) for samples in bins]
    trees = [None if prefixes is None or not samples else prefixes.of_some(samples).tree() for samples in members]
    lengths = [
        part.lengths.tolist() if tree is None else [*tree.lengths] for part, tree in zip(parts, trees, strict=True)
    ]
    each_multiple_of = share.multiple if prefixes is None else 1
    segments = _segments_of(lengths, math.lcm(multiple_of, share.multiple), equal_lengths, each_multiple_of)
    return [
        _micro_batch(part, experience.token_index(samples), pieces, share, device, tree)
        for samples, part, pieces, tree in zip(bins, parts, segments, trees, strict=True)
    ]


@dataclass(frozen=True)
class Packing:
    """The packing requirements of a model. The first five settings are arguments of `pack`."""

    device: torch.device
    share: ContextShare = WHOLE
    rows_multiple: int = 1
    """The number of rows per rank of the share is a multiple of this."""
    equal_lengths: bool = False
    count_multiple_of: int = 1
    together: dist.ProcessGroup | None = None
    """Ranks with the same number of micro-batches, because none of them can compute alone. None: this rank can."""
    padding: Literal["least", "longest", "longest of all"] = "least"
    """Rows of a padding-only micro-batch: the fewest possible, those of the rank's longest one, or those of the longest
    of all ranks. In the last case all other micro-batches are padded to the same length."""
    prefixes: Literal["auto"] | bool = False
    """Whether prefixes that samples share are computed once. auto: if that saves enough tokens."""
    looks_ahead: bool = False
    """Whether tokens share a row only if the tokens after them are the same too."""


def make_micro_batches(experience: Experience, max_tokens: int, how: Packing) -> list[MicroBatch]:
    """Splits `experience` into micro-batches of at most `max_tokens` tokens on each rank of the share.

    Some may have only padding. Collective over: the ranks of `how.together`.
    """
    share, batches = how.share, list[MicroBatch]()
    if experience.num_samples:
        batches = pack(
            experience,
            max_tokens * share.size,
            device=how.device,
            multiple_of=share.size * how.rows_multiple,
            equal_lengths=how.equal_lengths,
            count_multiple_of=how.count_multiple_of,
            share=share,
            prefixes=_shared_prefixes(experience, how),
        )
    if how.together is None:
        return batches
    longest = max((len(batch.padded_tokens) for batch in batches), default=0)
    sizes = torch.tensor([len(batches), longest], device=how.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=how.together)
    count, longest_of_all = sizes.tolist()
    least = math.lcm(how.rows_multiple, share.multiple // share.size)
    length = {"least": least, "longest": longest or least, "longest of all": longest_of_all}[how.padding]
    if how.padding == "longest of all":
        batches = [padded_to(batch, length, share) for batch in batches]
    return batches + [padding_alone(experience, length, how.device, share)] * (count - len(batches))


def _shared_prefixes(experience: Experience, how: Packing) -> SortedSamples | None:
    """Returns the sorted samples if prefixes are to be shared."""
    if how.prefixes is False:
        return None
    prefixes = SortedSamples.of(experience, looks_ahead=how.looks_ahead)
    num_rows, saved = prefixes.num_rows(0, experience.num_samples), LEAST_SAVED if how.prefixes == "auto" else 0.0
    return prefixes if num_rows < experience.num_tokens * (1 - saved) else None


def padded_to(batch: MicroBatch, length: int, share: ContextShare = WHOLE) -> MicroBatch:
    """Returns the micro-batch padded at the end to `length` rows on each rank of `share`.

    `length` must be even if several ranks share the samples.
    """
    num_samples, behind = len(batch.lengths), (0, length - len(batch.padded_tokens))
    if batch.tree is not None:
        segments = _segments([*batch.tree.lengths], length * share.size)
        made = _micro_batch(
            batch.experience, batch.token_index, segments, share, batch.padded_tokens.device, batch.tree
        )
        return replace(made, experience=batch.experience)
    slices = batch.slices
    if slices is not None:
        of_row = torch.nn.functional.pad(slices.sample_of_row, behind, value=num_samples)
        slices = replace(slices, sample_of_row=of_row)
    return replace(
        batch,
        padded_tokens=torch.nn.functional.pad(batch.padded_tokens, behind),
        segments=_segments([*batch.segments[:num_samples]], length * share.size),
        slices=slices,
    )


def padding_alone(like: Experience, length: int, device: torch.device, share: ContextShare = WHOLE) -> MicroBatch:
    """Returns a micro-batch without samples, with the fields of `like` and `length` rows on each rank of `share`."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return _micro_batch(like.select(nothing), nothing, (length * share.size,), share, device)


def _on_device(samples: Experience, device: torch.device) -> Experience:
    """Moves all fields to `device` except LEFT_ON_HOST. A model moves its own part of those later."""
    columns = samples.columns().items()
    return Experience(**{name: value if name in LEFT_ON_HOST else value.to(device) for name, value in columns})


def _micro_batch(
    samples: Experience,
    token_index: Tensor,
    segments: tuple[int, ...],
    share: ContextShare,
    device: torch.device,
    tree: PrefixTree | None = None,
) -> MicroBatch:
    if tree is not None:
        tokens, slices = _rows_of_tree(samples, tree, sum(segments), share, device)
    elif share.size == 1:
        tokens, slices = torch.nn.functional.pad(samples.tokens, (0, sum(segments) - samples.num_tokens)), None
    else:
        tokens, slices = _sliced(samples, segments, share, device)
    return MicroBatch(
        experience=_on_device(samples, device),
        token_index=token_index,
        padded_tokens=tokens.to(device),
        lengths=tuple(samples.lengths.tolist()),
        segments=segments,
        slices=slices,
        tree=tree,
    )


def _rows_of_tree(
    samples: Experience, tree: PrefixTree, num_places: int, share: ContextShare, device: torch.device
) -> tuple[Tensor, Slices]:
    """Returns the token ids of this rank (host) and its rows of the tree (on `device`).

    The rows of all ranks are the tree's rows and padding, cut like a single sequence.
    """
    ids, num_samples = samples.tokens.cpu(), samples.num_samples
    behind = (0, num_places - tree.num_rows)
    sample_of_token = torch.repeat_interleave(torch.arange(num_samples), samples.lengths.cpu())
    padded = torch.nn.functional.pad(ids[tree.token_of_row], behind)
    sample_at = torch.nn.functional.pad(sample_of_token[tree.token_of_row], behind, value=num_samples)
    token_at, row_of_token = tree.token_of_row, tree.row_of_token
    if share.size > 1:
        of_rank = places_of((num_places,), share)
        token_at = torch.nn.functional.pad(token_at, behind)[of_rank]
        row_of_token = inverse(places_of_all((num_places,), share.size))[row_of_token]
        padded, sample_at = padded[of_rank], sample_at[of_rank]
    return padded, Slices(
        token_of_row=token_at.to(device),
        row_of_token=row_of_token.to(device),
        sample_of_row=sample_at.to(device),
        drawn=tuple(
            _drawn(row_of_token, samples.lengths.cpu(), len(token_at), share, device, ahead)
            for ahead in (1, 2)[: 1 + tree.looks_ahead]
        ),
    )


def _drawn(
    row_of_token: Tensor, lengths: Tensor, num_rows: int, share: ContextShare, device: torch.device, ahead: int
) -> Drawn:
    """Returns the tokens `ahead` places after this rank's `num_rows` rows. `row_of_token` counts rows of all ranks."""
    tokens = (ranges(torch.zeros_like(lengths), lengths) >= ahead).nonzero().flatten()
    rows = row_of_token[tokens - ahead] - share.rank * num_rows
    here = (rows >= 0) & (rows < num_rows)
    rows, order = rows[here].sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(num_rows + 1))
    return Drawn(rows.to(device), tokens[here][order].to(device), starts)


def _sliced(
    samples: Experience, segments: tuple[int, ...], share: ContextShare, device: torch.device
) -> tuple[Tensor, Slices]:
    """Returns the token ids of this rank (host) and their slices (on `device`)."""
    num_places, of_samples = sum(segments), segments[: samples.num_samples]
    sizes = torch.tensor(of_samples, dtype=torch.int64)
    places = ranges(sizes.cumsum(0) - sizes, samples.lengths)
    padded, token_at = torch.zeros(2, num_places, dtype=torch.int64)
    padded[places], token_at[places] = samples.tokens, torch.arange(samples.num_tokens)
    sample_at = torch.full((num_places,), samples.num_samples)
    sample_at[places] = torch.repeat_interleave(torch.arange(samples.num_samples), samples.lengths)
    row_of_place = inverse(places_of_all(of_samples, share.size))
    of_rank = places_of(segments, share)
    return padded[of_rank], Slices(
        token_of_row=token_at[places_of(of_samples, share)].to(device),
        row_of_token=row_of_place[places].to(device),
        sample_of_row=sample_at[of_rank].to(device),
    )


def _sample_bins(
    experience: Experience, max_tokens: int, count_multiple_of: int, prefixes: SortedSamples | None
) -> list[list[int]]:
    """Returns the samples of each micro-batch in ascending order."""
    if experience.has("chosen"):
        _, pair_of, sizes = torch.unique_consecutive(experience.group_ids, return_inverse=True, return_counts=True)
        costs = torch.zeros_like(sizes).index_add(0, pair_of, experience.lengths).tolist()
        units = [members.tolist() for members in torch.arange(experience.num_samples).split(sizes.tolist())]
        if prefixes is not None:
            alone = (prefixes.of_some(members) for members in units)
            costs = [pair.num_rows(0, len(pair.order)) for pair in alone]
    elif prefixes is not None:
        families = prefixes.families(max_tokens)
        units, costs = [members for members, _ in families], [num_rows for _, num_rows in families]
    else:
        return balanced_bins(experience.lengths.tolist(), max_tokens, count_multiple_of)
    bins = balanced_bins(costs, max_tokens, count_multiple_of)
    return [sorted(sample for number in members for sample in units[number]) for members in bins]


def balanced_bins(lengths: Sequence[int], max_tokens: int, count_multiple_of: int = 1) -> list[list[int]]:
    """Distributes the indices of `lengths` over as few bins as longest-first placement needs, each in ascending order.

    No bin exceeds `max_tokens`, except for a single longer item. Bins are ordered by their first index. Their number is
    a multiple of `count_multiple_of`. If there are too few items, the last bins are empty.
    """
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    others = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: -lengths[i])
    num_bins = math.ceil(sum(lengths[i] for i in others) / max_tokens)
    bins = _longest_first(lengths, others, num_bins)
    while any(sum(lengths[i] for i in members) > max_tokens for members in bins) or (
        (len(alone) + num_bins) % count_multiple_of
    ):
        num_bins += 1
        bins = _longest_first(lengths, others, num_bins)
    used = sorted(sorted(members) for members in [*alone, *bins] if members)
    return used + [[] for _ in range(-len(used) % count_multiple_of)]


def _longest_first(lengths: Sequence[int], descending: Sequence[int], num_bins: int) -> list[list[int]]:
    """Puts each index into the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for i in descending:
        load, number = loads[0]
        bins[number].append(i)
        heapq.heapreplace(loads, (load + lengths[i], number))
    return bins


def _segments_of(
    lengths: Sequence[list[int]], multiple_of: int, equal_lengths: bool, each_multiple_of: int
) -> list[tuple[int, ...]]:
    """Returns `MicroBatch.segments` for each micro-batch, from its samples' lengths."""
    padded = [[_up_to(length, each_multiple_of) for length in of_batch] for of_batch in lengths]
    totals = [_up_to(sum(of_batch), math.lcm(multiple_of, each_multiple_of)) for of_batch in padded]
    if equal_lengths and totals:
        totals = [max(totals)] * len(totals)
    return [_segments(of_batch, total) for of_batch, total in zip(padded, totals, strict=True)]


def _up_to(length: int, multiple_of: int) -> int:
    return math.ceil(length / multiple_of) * multiple_of


def _segments(lengths: list[int], padded_length: int) -> tuple[int, ...]:
    longest, num_padding = max(lengths, default=padded_length), padded_length - sum(lengths)
    whole_pieces, rest = divmod(num_padding, longest)
    return (*lengths, *[longest] * whole_pieces, *[rest] * (rest > 0))


# Outputs of context-parallel ranks, gathered for all tokens on every rank.


def of_all_tokens(batch: MicroBatch, of_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers the outputs of every rank's rows for all tokens of a micro-batch, [tokens, ...].

    All ranks compute the same loss from them, so each rank takes the gradients of its own rows. Their sum over the
    ranks is the gradient of the loss. Collective over: the context-parallel group.
    """
    if batch.slices is None:
        return of_rows
    of_all: Tensor = of_rows if group.size() == 1 else _Gathered.apply(of_rows, group)
    if batch.tree is not None:
        return of_all[batch.slices.row_of_token]  # its gradients are added up in a fixed order on GPUs too
    return of_all.index_select(0, batch.slices.row_of_token)


def of_drawn_tokens(batch: MicroBatch, drawn: Drawn, values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the values of all tokens of a micro-batch with a tree, [tokens, ...], from those of `drawn.tokens`.

    They are 0 at the other tokens, the first of each sample. Ranks take gradients as in `of_all_tokens`. Collective
    over: the context-parallel group.
    """
    nothing = values.new_zeros(batch.num_tokens, *values.shape[1:])
    of_tokens = nothing.index_copy(0, drawn.tokens, values)
    if group.size() == 1:
        return of_tokens
    summed: Tensor = _Summed.apply(of_tokens, group)
    return summed


class _Summed(torch.autograd.Function):
    """Sums over all ranks, and gives each rank the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, of_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        of_all = of_rank.clone()
        dist.all_reduce(of_all, group=group)
        return of_all

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    """Gathers [rows of this rank, ...] into [rows of all ranks, ...], in rank order."""

    @staticmethod
    def forward(ctx: Any, of_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_rows = group.rank(), len(of_rows)
        of_all = of_rows.new_empty(group.size() * len(of_rows), *of_rows.shape[1:])
        dist.all_gather_into_tensor(of_all, of_rows.contiguous(), group=group)
        return of_all

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = ctx.rank * ctx.num_rows
        return gradients[0][first : first + ctx.num_rows].contiguous(), None


# Ulysses: every rank has all tokens, but only some heads (DeepSpeed-Ulysses, arXiv:2309.14509).


@dataclass(frozen=True, eq=False)
class WholeSequences:
    """The order of tokens in packed sequences shared by several ranks."""

    lengths: tuple[int, ...]
    row_of_place: Tensor
    """Row of each token among all ranks' rows in rank order, [tokens]."""
    place_of_row: Tensor
    """The inverse permutation, [tokens]."""
    derived: dict[str, Any] = field(default_factory=dict)
    """Cache of values made once for all layers."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int, device: torch.device) -> "WholeSequences":
        """Builds the order for packed sequences of these lengths on `size` ranks."""
        order = places_of_all(lengths, size)
        return cls(tuple(lengths), inverse(order).to(device), order.to(device))


def spread_over_heads(x: Tensor, whole: WholeSequences, group: dist.ProcessGroup) -> Tensor:
    """Exchanges x [rows of this rank, ranks, values of a rank's heads ...] for [tokens of all ranks, values of this
    rank's heads ...].

    Collective over: `group`, in forward and backward.
    """
    received: Tensor = _AllToAll.apply(x.transpose(0, 1).flatten(0, 1), group)
    return received.index_select(0, whole.row_of_place)


def back_from_heads(x: Tensor, whole: WholeSequences, group: dist.ProcessGroup) -> Tensor:
    """Exchanges [tokens of all ranks, values of this rank's heads ...] for [rows of this rank, ranks, ...].

    It is the inverse of `spread_over_heads`. Collective over: `group`, in forward and backward.
    """
    by_rank: Tensor = _AllToAll.apply(x.index_select(0, whole.place_of_row), group)
    return by_rank.unflatten(0, (group.size(), -1)).transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    """Sends equal parts of the first dimension to all ranks. Gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received
