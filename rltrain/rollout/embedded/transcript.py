"""What the running responses have drawn, kept on the device until somebody reads it."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Transcript:
    """Tokens and log-probs [capacity, num_columns], a column per response: row p holds what feeding position p drew.

    A response keeps its column while it moves between the slots of the cache, and its places while capacity grows.
    One more column, that no response has, is for what nobody will read.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self._num_columns = num_columns + 1
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # both flat, as `write` needs them
        self._logprobs = torch.zeros(0, dtype=torch.float32, device=device)
        self.nowhere = num_columns
        """A place of the column that nobody reads."""
        self.clear()

    def clear(self) -> None:
        """Free all columns."""
        self._free = list(range(self.nowhere))[::-1]

    def reserve(self, capacity: int) -> None:
        """Make room for positions below `capacity`, keeping what is there."""
        size = capacity * self._num_columns
        if size > len(self._tokens):
            self._tokens, self._logprobs = _grown(self._tokens, size), _grown(self._logprobs, size)

    @property
    def stride(self) -> int:
        """From a place to that of the column's next position."""
        return self._num_columns

    def release(self) -> None:
        """Give the memory back."""
        self._tokens, self._logprobs = self._tokens.new_empty(0), self._logprobs.new_empty(0)

    def addresses(self) -> tuple[int, int]:
        """Where tokens and log-probs lie now."""
        return self._tokens.data_ptr(), self._logprobs.data_ptr()

    def take(self, num_columns: int) -> list[int]:
        """Free columns, for as many responses."""
        return [self._free.pop() for _ in range(num_columns)]

    def give_back(self, columns: Sequence[int]) -> None:
        """Free the columns of responses that are done."""
        self._free += columns

    def place(self, position: int, column: int) -> int:
        """Where `write` puts what feeding `position` draws; the next position is `stride` further."""
        return position * self._num_columns + column

    def write(self, places: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Note what was drawn at each place: all [running]."""
        self._tokens.index_copy_(0, places, tokens)
        self._logprobs.index_copy_(0, places, logprobs)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs, on the host, of each span: its column, its first position and how many."""
        counts = [count for _, _, count in spans]
        starts = [self.place(first, column) for column, first, _ in spans]
        ends = [*accumulate(counts)]
        # Place n of all that is wanted is `stride` after place n - 1, but where a span starts.
        bases = [start - (end - n) * self.stride for start, end, n in zip(starts, ends, counts, strict=True)]
        per_span = torch.tensor([bases, counts], dtype=torch.int64, device=self._tokens.device)
        wanted = torch.arange(sum(counts), device=per_span.device).mul_(self.stride)
        wanted += per_span[0].repeat_interleave(per_span[1], output_size=len(wanted))
        tokens, logprobs = (buffer.index_select(0, wanted).tolist() for buffer in (self._tokens, self._logprobs))
        return [(tokens[end - n : end], logprobs[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _grown(buffer: Tensor, size: int) -> Tensor:
    grown = buffer.new_empty(size)
    grown[: len(buffer)] = buffer
    return grown
