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

# Which tokens of packed sequences each rank of context parallelism computes.
#
# Every sequence is padded and cut into twice as many equal slices as there are ranks, of which rank r has slice r and
# the r-th from behind. A token attends to all before it: so every rank has as much to do as the others, in every
# sequence (Llama 3, arXiv:2407.21783, section 3.3.2). Transformer Engine cuts packed sequences the same way.


@dataclass(frozen=True)
class ContextShare:
    """What rank `rank` of `size` computes of every sequence: of one rank all."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Of which a sequence's padded length is one."""
        return 2 * self.size if self.size > 1 else 1

    def slices(self) -> tuple[int, int]:
        """The two that the rank has of 2 * size."""
        return self.rank, 2 * self.size - 1 - self.rank


WHOLE = ContextShare()


def places_of(lengths: Sequence[int], share: ContextShare) -> Tensor:
    """[rows] int64: where the tokens that a rank computes lie in sequences of `lengths` tokens, laid end to end.

    A sequence's two slices follow each other, sequence by sequence. Lengths are multiples of `share.multiple`.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    each, starts = sizes // (2 * share.size), sizes.cumsum(0) - sizes
    first = torch.stack([starts + number * each for number in share.slices()], dim=1)
    return ranges(first.flatten(), each.repeat_interleave(2))


def positions_of(lengths: Sequence[int], share: ContextShare) -> Tensor:
    """Returns [rows] the position of each token of `places_of` in its sequence."""
    sizes = torch.tensor(lengths)
    return ranges(torch.zeros_like(sizes), sizes)[places_of(lengths, share)]


def places_of_all(lengths: Sequence[int], size: int) -> Tensor:
    """[tokens] as `places_of`, of all ranks, one after the other: the order in which their rows are gathered."""
    return torch.cat([places_of(lengths, ContextShare(rank, size)) for rank in range(size)])


def inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order))
    return result


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers from each start on, as many as its length, one range after the other."""
    begin = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - begin, lengths) + torch.arange(int(lengths.sum()))


# Micro-batches: samples packed end to end, balanced by tokens.

LEFT_ON_HOST = frozenset({"routed_experts"})
"""Fields that are much larger than others, and of which a rank needs those of its own layers."""


@dataclass(frozen=True)
class Slices:
    """What a rank computes of samples that it shares with other ranks. Rows are tokens and the samples' padding."""

    token_of_row: Tensor
    """[rows of this rank] the token that each row is of; any one where that is padding."""
    row_of_token: Tensor
    """[tokens] each token's row among those of all ranks, one rank's after the other."""
    sample_of_row: Tensor
    """[rows of this rank + padding behind the last sample] the number of the sample whose token a row is; that of
    samples where it is padding."""


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch, packed. `experience` has all of them, without padding, whoever computes what.

    Padding follows the last sample and, where several ranks share the samples, every one.
    """

    experience: Experience
    token_index: Tensor
    """[tokens] where the tokens stand in the mini-batch, host."""
    padded_tokens: Tensor
    """[rows + padding behind the last sample] token ids that this rank computes, device."""
    lengths: tuple[int, ...]
    """Of the samples."""
    segments: tuple[int, ...]
    """Lengths of the samples with their padding, then of pieces of padding no longer than the longest sample: together
    what all ranks that share the samples compute."""
    slices: Slices | None = None
    """None: this rank computes all tokens."""

    @property
    def num_tokens(self) -> int:
        return self.experience.num_tokens

    @property
    def num_rows(self) -> int:
        """Of the model's output here, those of the samples."""
        return self.num_tokens if self.slices is None else len(self.slices.token_of_row)

    def rows_of(self, values: Tensor) -> Tensor:
        """[rows, ...] what `values` [tokens, ...] are at the tokens that this rank computes."""
        return values if self.slices is None else values[self.slices.token_of_row.to(values.device)]


def pack(
    experience: Experience,
    max_tokens: int,
    *,
    device: torch.device,
    multiple_of: int = 1,
    equal_lengths: bool = False,
    count_multiple_of: int = 1,
    share: ContextShare = WHOLE,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens before padding (a longer sample stands alone), on `device`.

    Every sample is in exactly one micro-batch, and samples keep their order within it. Those of a pair stay together,
    and count as one where `max_tokens` limits. What all ranks of a `share` compute together is padded to a multiple of
    `multiple_of` tokens; with `equal_lengths` all are padded to the length of the longest. There is a multiple of
    `count_multiple_of` micro-batches; where samples are too few for that, some have padding alone. A pure function:
    ranks that hold the same samples get the same micro-batches, each with its own share of their tokens.
    """
    bins = [
        torch.tensor(samples, dtype=torch.int64) for samples in _sample_bins(experience, max_tokens, count_multiple_of)
    ]
    parts = [experience.select(samples) for samples in bins]
    segments = _segments_of([part.lengths.tolist() for part in parts], multiple_of, equal_lengths, share.multiple)
    return [
        _micro_batch(part, experience.token_index(samples), pieces, share, device)
        for samples, part, pieces in zip(bins, parts, segments, strict=True)
    ]


@dataclass(frozen=True)
class Packing:
    """How a model takes micro-batches. The first five settings are for `pack`."""

    device: torch.device
    share: ContextShare = WHOLE
    rows_multiple: int = 1
    """Of which the rows on each rank of the share are a multiple."""
    equal_lengths: bool = False
    count_multiple_of: int = 1
    together: dist.ProcessGroup | None = None
    """Ranks of which none can compute alone: all have as many micro-batches. None: this one can."""
    padding: Literal["least", "longest", "longest of all"] = "least"
    """Rows of a micro-batch of padding alone: the fewest, as many as the rank's longest has, or as many as the longest
    of all has, to which the others are padded too."""


def make_micro_batches(experience: Experience, max_tokens: int, how: Packing) -> list[MicroBatch]:
    """Returns `experience` in micro-batches of at most `max_tokens` tokens on each rank that shares samples.

    Some may have padding alone. Collective over: the ranks of `how.together`.
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


def padded_to(batch: MicroBatch, length: int, share: ContextShare = WHOLE) -> MicroBatch:
    """The same samples and as much padding behind them as makes `length` rows on each rank of `share`, a multiple of 2
    where these are several."""
    num_samples, behind = len(batch.lengths), (0, length - len(batch.padded_tokens))
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
    """A micro-batch of no samples, with the fields of `like`, of `length` rows on each rank of `share`."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return _micro_batch(like.select(nothing), nothing, (length * share.size,), share, device)


def _on_device(samples: Experience, device: torch.device) -> Experience:
    """All but the fields of which a model takes its own part, when it takes the micro-batch."""
    columns = samples.columns().items()
    return Experience(**{name: value if name in LEFT_ON_HOST else value.to(device) for name, value in columns})


def _micro_batch(
    samples: Experience, token_index: Tensor, segments: tuple[int, ...], share: ContextShare, device: torch.device
) -> MicroBatch:
    if share.size == 1:
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
    )


def _sliced(
    samples: Experience, segments: tuple[int, ...], share: ContextShare, device: torch.device
) -> tuple[Tensor, Slices]:
    """The token ids that this rank computes, host, and which they are, on `device`."""
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


def _sample_bins(experience: Experience, max_tokens: int, count_multiple_of: int) -> list[list[int]]:
    """The samples of each micro-batch, ascending."""
    if not experience.has("chosen"):
        return balanced_bins(experience.lengths.tolist(), max_tokens, count_multiple_of)
    _, pair_of, sizes = torch.unique_consecutive(experience.group_ids, return_inverse=True, return_counts=True)
    pair_tokens = torch.zeros_like(sizes).index_add(0, pair_of, experience.lengths)
    pairs = torch.arange(experience.num_samples).split(sizes.tolist())
    bins = balanced_bins(pair_tokens.tolist(), max_tokens, count_multiple_of)
    return [[sample for i in members for sample in pairs[i].tolist()] for members in bins]


def balanced_bins(lengths: Sequence[int], max_tokens: int, count_multiple_of: int = 1) -> list[list[int]]:
    """Indices of `lengths` in as few bins as longest-first placement needs, each bin's indices ascending.

    No bin exceeds `max_tokens` unless it holds a single length that does. Bins are ordered by their first index. Their
    number is a multiple of `count_multiple_of`: the last ones are empty where `lengths` are too few for that.
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
    """Each index goes to the bin with the fewest tokens so far."""
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
    """`MicroBatch.segments` of samples of these lengths, of every micro-batch."""
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


# What ranks that share sequences made of their rows, for all tokens, on each of them.


def of_all_tokens(batch: MicroBatch, of_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tokens, ...] of the samples of a micro-batch what every rank made of its own rows.

    All ranks make the same loss of them, so each takes the gradients of its rows: their sum over the ranks is that of
    the loss. Collective over: the context-parallel group.
    """
    if batch.slices is None:
        return of_rows
    of_all: Tensor = _Gathered.apply(of_rows, group)
    return of_all.index_select(0, batch.slices.row_of_token)


class _Gathered(torch.autograd.Function):
    """[rows of this rank, ...] -> [rows of all ranks, ...], one rank's after the other."""

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


# All tokens on each of the ranks that share sequences, in some of the heads (DeepSpeed-Ulysses, arXiv:2309.14509).


@dataclass(frozen=True, eq=False)
class WholeSequences:
    """All sequences, laid end to end, of which every rank has some rows."""

    lengths: tuple[int, ...]
    row_of_place: Tensor
    """[tokens] the row of all ranks, one's after the other, of each token."""
    place_of_row: Tensor
    """[tokens] the inverse."""
    derived: dict[str, Any] = field(default_factory=dict)
    """What layers make once for all of them."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int, device: torch.device) -> "WholeSequences":
        """Returns packed sequences of these lengths that `size` ranks share."""
        order = places_of_all(lengths, size)
        return cls(tuple(lengths), inverse(order).to(device), order.to(device))


def spread_over_heads(x: Tensor, whole: WholeSequences, group: dist.ProcessGroup) -> Tensor:
    """x [rows of this rank, ranks, what a rank's heads have ...] -> [tokens of all ranks, what this rank's have ...].

    Collective over: `group`, and in backward.
    """
    received: Tensor = _AllToAll.apply(x.transpose(0, 1).flatten(0, 1), group)
    return received.index_select(0, whole.row_of_place)


def back_from_heads(x: Tensor, whole: WholeSequences, group: dist.ProcessGroup) -> Tensor:
    """The way back: [tokens of all ranks, what this rank's heads have ...] -> [rows of this rank, ranks, ...].

    Collective over: `group`, and in backward.
    """
    by_rank: Tensor = _AllToAll.apply(x.index_select(0, whole.place_of_row), group)
    return by_rank.unflatten(0, (group.size(), -1)).transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dimension, one for each rank; gradients go back the same way."""

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
