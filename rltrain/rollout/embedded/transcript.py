"""What the running responses have drawn, kept on the device until somebody reads it."""

from collections.abc import Sequence

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
        missing = capacity * self._num_columns - self._tokens.numel()
        if missing > 0:
            self._tokens, self._logprobs = (
                torch.cat([old, old.new_zeros(missing)]) for old in (self._tokens, self._logprobs)
            )

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
        if not spans:
            return []
        columns = torch.tensor([column for column, _, _ in spans], device=self._tokens.device)
        top = min(first for _, first, _ in spans)
        bottom = max(first + count for _, first, count in spans)
        tokens, logprobs = (
            buffer.view(-1, self._num_columns)[top:bottom].index_select(1, columns).t().tolist()
            for buffer in (self._tokens, self._logprobs)
        )
        rows = [slice(first - top, first - top + count) for _, first, count in spans]
        return [(tokens[i][row], logprobs[i][row]) for i, row in enumerate(rows)]
