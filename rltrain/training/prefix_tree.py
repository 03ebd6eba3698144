"""Prefix trees: tokens that several samples begin with alike are rows that are computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.models.table import IntArray

MIN_SHARED_TOKENS = 16
"""Shorter runs are computed for each sample. They would save less than their own piece of attention costs."""

LEAST_SAVED = 0.1
"""Share of tokens from which `share_prefixes: auto` shares prefixes."""

TOLD_APART_BY = ("tokens", "routed_experts", "image_keys", "rope_positions")
"""Fields in which tokens must be equal to share a row. A router may have sent equal tokens to different experts, and
equal tokens may stand for different images."""


@dataclass(frozen=True)
class PrefixTree:
    """Samples as a tree of runs. A run's tokens belong to the same samples, which are equal up to its end.

    Runs are in depth-first order, so a run's descendants follow it. The rows are the tokens of all runs, end to end.
    """

    parents: tuple[int, ...]
    """Number of the run before each run, or -1, [runs]."""
    starts: tuple[int, ...]
    """First row of each run, [runs]."""
    lengths: tuple[int, ...]
    """Rows of each run, [runs]."""
    depths: tuple[int, ...]
    """Position of a run's first token in its samples, [runs]."""
    token_of_row: Tensor
    """Token of each row in the first of its samples, int64 [rows]."""
    row_of_token: Tensor
    """Row of each token of the samples, laid end to end, int64 [tokens]."""
    looks_ahead: bool = False
    """Whether all samples of a row have the same token after it."""

    @property
    def num_rows(self) -> int:
        return len(self.token_of_row)

    @property
    def positions(self) -> Tensor:
        """The position of each row in its samples, int64 [rows]."""
        sizes, depths = torch.tensor(self.lengths), torch.tensor(self.depths)
        return ranges(depths, sizes)

    def paths(self) -> list[list[tuple[int, int]]]:
        """Returns for each run the rows from its samples' beginning to its end, as (first row, number of rows)."""
        found: list[list[tuple[int, int]]] = []
        for parent, start, length in zip(self.parents, self.starts, self.lengths, strict=True):
            found.append([*(found[parent] if parent >= 0 else ()), (start, length)])
        return found


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns concatenated ranges of integers. Range i has `lengths[i]` integers from `starts[i]` on."""
    begin = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - begin, lengths) + torch.arange(int(lengths.sum()))


def following_tokens(experience: Experience) -> Tensor:
    """Returns the token after each token in its sample, or 0 at the sample's end, [tokens]."""
    following = experience.tokens.roll(-1)
    following[experience.offsets()[1:] - 1] = 0
    return following


@dataclass(frozen=True)
class SortedSamples:
    """Samples in an order in which equal beginnings are neighbours."""

    lengths: IntArray
    """Lengths of the samples in tokens, [samples]."""
    order: IntArray
    """Sample numbers in this order, [samples]."""
    shared: IntArray
    """Number of tokens that each sample in this order begins with like the one before it, [samples]."""
    looks_ahead: bool = False
    """Whether the tokens after these are the same too."""

    @classmethod
    def of(cls, experience: Experience, *, looks_ahead: bool = False) -> "SortedSamples":
        """Sorts the samples of `experience` by the bytes of TOLD_APART_BY.

        With `looks_ahead` tokens differ also if the tokens after them do, as in `following_tokens`.
        """
        columns = [_bytes_of(getattr(experience, name)) for name in TOLD_APART_BY if experience.has(name)]
        if looks_ahead:
            columns.append(_bytes_of(following_tokens(experience)))
        table = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        lengths = experience.lengths.numpy()
        stops = lengths.cumsum()
        parts = [table[stop - length : stop] for length, stop in zip(lengths, stops, strict=True)]
        keys = [part.tobytes() for part in parts]
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
        shared = np.zeros(len(order), dtype=np.int64)
        for place in range(1, len(order)):
            shared[place] = _equal_rows(parts[order[place - 1]], parts[order[place]])
        return cls(lengths, order, shared, looks_ahead)

    def of_some(self, samples: Sequence[int]) -> "SortedSamples":
        """Returns the same for some of the samples, which are numbered by their places in `samples`."""
        number = np.full(len(self.order), -1)
        number[list(samples)] = np.arange(len(samples))
        places = np.flatnonzero(number[self.order] >= 0)
        # Two samples begin alike as far as all neighbours between them do.
        shared = np.zeros(len(places), dtype=np.int64)
        if len(places) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return SortedSamples(self.lengths[list(samples)], number[self.order[places]], shared, self.looks_ahead)

    def tree(self) -> PrefixTree:
        """Returns the tree of the samples."""
        offsets = torch.from_numpy(self.lengths.cumsum() - self.lengths)
        runs = self.runs(0, len(self.order))
        starts = np.cumsum([0, *(run.length for run in runs)])
        row_of_token = torch.zeros(int(self.lengths.sum()), dtype=torch.int64)
        of_runs = torch.tensor([run.first for run in runs], dtype=torch.int64)
        sizes = torch.tensor([run.length for run in runs], dtype=torch.int64)
        depths = torch.tensor([run.depth for run in runs], dtype=torch.int64)
        order = torch.from_numpy(self.order)
        counts = torch.tensor([run.stop - run.first for run in runs], dtype=torch.int64)
        members, run_of = ranges(of_runs, counts), torch.repeat_interleave(torch.arange(len(runs)), counts)
        begins = offsets[order[members]] + depths[run_of]
        places = torch.from_numpy(starts[:-1])[run_of]
        row_of_token[ranges(begins, sizes[run_of])] = ranges(places, sizes[run_of])
        token_of_row = ranges(offsets[order[of_runs]] + depths, sizes)
        return PrefixTree(
            parents=tuple(run.parent for run in runs),
            starts=tuple(starts[:-1].tolist()),
            lengths=tuple(run.length for run in runs),
            depths=tuple(run.depth for run in runs),
            token_of_row=token_of_row,
            row_of_token=row_of_token,
            looks_ahead=self.looks_ahead,
        )

    def runs(self, first: int, stop: int) -> list["Run"]:
        """Returns the runs of the samples at the places from `first` to `stop`, in depth-first order."""
        found: list[Run] = []
        pending = [(first, stop, 0, -1)] if stop > first else []
        while pending:
            first, stop, depth, parent = pending.pop()
            if stop - first == 1:
                length = int(self.lengths[self.order[first]])
                if length > depth:
                    found.append(Run(first, stop, depth, length - depth, parent))
                continue
            within = self.shared[first + 1 : stop]
            branch = int(within.min())
            if branch - depth >= MIN_SHARED_TOKENS:
                found.append(Run(first, stop, depth, branch - depth, parent))
                depth, parent = branch, len(found) - 1
            cuts = [first, *(first + 1 + np.flatnonzero(within == branch)).tolist(), stop]
            pending += [(*ends, depth, parent) for ends in reversed([*zip(cuts, cuts[1:], strict=False)])]
        return found

    def num_rows(self, first: int, stop: int) -> int:
        """Returns the rows of the tree of the samples at the places from `first` to `stop`."""
        return sum(run.length for run in self.runs(first, stop))

    def families(self, max_rows: int) -> list[tuple[list[int], int]]:
        """Returns sets of samples whose trees have at most `max_rows` rows, each with its rows.

        Samples that share tokens are in one set if it is not too large. A longer sample has a set of its own.
        """
        found = []
        cuts = [*np.flatnonzero(self.shared < MIN_SHARED_TOKENS).tolist(), len(self.order)]
        for first, stop in zip(cuts, cuts[1:], strict=False):
            while first < stop:
                last, rows = stop, self.num_rows(first, stop)
                if rows > max_rows:
                    last = self._last_that_fits(first, stop, max_rows)
                    rows = self.num_rows(first, last)
                found.append((self.order[first:last].tolist(), rows))
                first = last
        return found

    def _last_that_fits(self, first: int, stop: int, max_rows: int) -> int:
        """Returns the largest end of a set from `first` on with at most `max_rows` rows, at least first + 1."""
        fits, too_far = first + 1, stop
        while too_far - fits > 1:
            middle = (fits + too_far) // 2
            if self.num_rows(first, middle) <= max_rows:
                fits = middle
            else:
                too_far = middle
        return fits


@dataclass(frozen=True)
class Run:
    """A run of tokens that the samples at the places from `first` to `stop` share, from position `depth` on."""

    first: int
    stop: int
    depth: int
    length: int
    parent: int


def _bytes_of(column: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Returns the bytes of each token's entry, uint8 [tokens, bytes]."""
    values = np.ascontiguousarray(column.numpy())
    return values.reshape(len(values), -1).view(np.uint8)


def _equal_rows(one: IntArray, other: IntArray) -> int:
    """Returns the number of equal rows at the beginning of two tables."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).any(axis=1)
    return int(differ.argmax()) if differ.any() else count
