"""Micro-batches: samples packed end to end, balanced by tokens."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.data.experience import Experience


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a mini-batch, packed. Padding follows the last sample and is not part of `experience`."""

    experience: Experience
    token_index: Tensor
    """[tokens] where the tokens stand in the mini-batch, host."""
    padded_tokens: Tensor
    """[tokens + padding] token ids, device."""
    segments: tuple[int, ...]
    """Lengths of the samples, then of pieces of padding no longer than the longest sample."""

    @property
    def num_tokens(self) -> int:
        return self.experience.num_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the samples."""
        return self.segments[: len(self.experience.lengths)]


def pack(
    experience: Experience,
    max_tokens: int,
    *,
    device: torch.device,
    multiple_of: int = 1,
    equal_lengths: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens before padding (a longer sample stands alone), on `device`.

    Every sample is in exactly one micro-batch, and samples keep their order within it. Those of a pair stay together,
    and count as one where `max_tokens` limits. Each is padded to a multiple of
    `multiple_of` tokens; with `equal_lengths` all are padded to the length of the longest. A pure function: ranks
    that hold the same samples get the same micro-batches.
    """
    bins = [torch.tensor(samples) for samples in _sample_bins(experience, max_tokens)]
    parts = [experience.select(samples) for samples in bins]
    padded_lengths = [math.ceil(part.num_tokens / multiple_of) * multiple_of for part in parts]
    if equal_lengths and parts:
        padded_lengths = [max(padded_lengths)] * len(parts)
    return [
        MicroBatch(
            experience=Experience(**{name: value.to(device) for name, value in part.columns().items()}),
            token_index=experience.token_index(samples),
            padded_tokens=torch.nn.functional.pad(part.tokens, (0, length - part.num_tokens)).to(device),
            segments=_segments(part.lengths.tolist(), length),
        )
        for samples, part, length in zip(bins, parts, padded_lengths, strict=True)
    ]


def _sample_bins(experience: Experience, max_tokens: int) -> list[list[int]]:
    """The samples of each micro-batch, ascending."""
    if not experience.has("chosen"):
        return balanced_bins(experience.lengths.tolist(), max_tokens)
    _, pair_of, sizes = torch.unique_consecutive(experience.group_ids, return_inverse=True, return_counts=True)
    pair_tokens = torch.zeros_like(sizes).index_add(0, pair_of, experience.lengths)
    pairs = torch.arange(experience.num_samples).split(sizes.tolist())
    bins = balanced_bins(pair_tokens.tolist(), max_tokens)
    return [torch.cat([pairs[i] for i in members]).tolist() for members in bins]


def balanced_bins(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in as few bins as longest-first placement needs, each bin's indices ascending.

    No bin exceeds `max_tokens` unless it holds a single length that does. Bins are ordered by their first index.
    """
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    others = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: -lengths[i])
    num_bins = math.ceil(sum(lengths[i] for i in others) / max_tokens)
    bins = _longest_first(lengths, others, num_bins)
    while any(sum(lengths[i] for i in members) > max_tokens for members in bins):
        num_bins += 1
        bins = _longest_first(lengths, others, num_bins)
    return sorted(sorted(members) for members in [*alone, *bins] if members)


def _longest_first(lengths: Sequence[int], descending: Sequence[int], num_bins: int) -> list[list[int]]:
    """Each index goes to the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for i in descending:
        load, number = loads[0]
        bins[number].append(i)
        heapq.heapreplace(loads, (load + lengths[i], number))
    return bins


def _segments(lengths: list[int], padded_length: int) -> tuple[int, ...]:
    longest, num_padding = max(lengths), padded_length - sum(lengths)
    whole_pieces, rest = divmod(num_padding, longest)
    return (*lengths, *[longest] * whole_pieces, *[rest] * (rest > 0))
