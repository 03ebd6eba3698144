"""What the running responses have drawn, kept on the device until somebody reads it."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor


class Transcript:
    """Tokens and log-probs [capacity, num_columns], a column per response: row p holds what feeding position p drew.

    A response keeps its column while it moves between the slots of the cache, and its places while capacity grows.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self._num_columns = num_columns
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # both flat, as `write` needs them
        self._logprobs = torch.zeros(0, dtype=torch.float32, device=device)
        self._free = list(range(num_columns))[::-1]

    def reserve(self, capacity: int) -> None:
        """Make room for positions below `capacity`, keeping what is there."""
        size = capacity * self._num_columns
        if size > len(self._tokens):
            self._tokens, self._logprobs = _grown(self._tokens, size), _grown(self._logprobs, size)

    def take(self, num_columns: int) -> list[int]:
        """Free columns, for as many responses."""
        return [self._free.pop() for _ in range(num_columns)]

    def give_back(self, columns: Sequence[int]) -> None:
        """Free the columns of responses that are done."""
        self._free += columns

    def place(self, position: int, column: int) -> int:
        """Where `write` puts what feeding `position` draws; the next position is `num_columns` further."""
        return position * self._num_columns + column

    def write(self, places: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Note what was drawn at each place: all [running]."""
        self._tokens.index_copy_(0, places, tokens)
        self._logprobs.index_copy_(0, places, logprobs)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs, on the host, of each span: its column, its first position and how many."""
        counts = [count for _, _, count in spans]
        starts = [self.place(first, column) for column, first, _ in spans]
        stride = self._num_columns
        places = [*chain.from_iterable(range(i, i + n * stride, stride) for i, n in zip(starts, counts, strict=True))]
        wanted = torch.tensor(places, dtype=torch.int64, device=self._tokens.device)
        tokens, logprobs = (buffer.index_select(0, wanted).tolist() for buffer in (self._tokens, self._logprobs))
        ends = accumulate(counts)
        return [(tokens[end - n : end], logprobs[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _grown(buffer: Tensor, size: int) -> Tensor:
    grown = buffer.new_empty(size)
    grown[: len(buffer)] = buffer
    return grown
