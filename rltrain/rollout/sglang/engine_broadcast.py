"""What the first rank of an engine tells the others: they have no server to talk to, but make the same calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import DivergenceError, EngineError, EngineLost
from rltrain.rollout.engine import Completion, FinishReason, PartialResponse

T = TypeVar("T")

ERRORS = (EngineLost, EngineError, DivergenceError)
"""Raised on the first rank, these are raised on all."""
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


@dataclass(frozen=True)
class Row:
    """What exists of one response, all of it; without a finish reason it is not done."""

    id: int
    drawn: PartialResponse
    finish_reason: FinishReason | None = None

    @property
    def completion(self) -> Completion:
        assert self.finish_reason is not None
        drawn = self.drawn
        return Completion(self.id, drawn.tokens, drawn.logprobs, drawn.policy_versions, self.finish_reason)


class EngineBroadcast:
    """Over `group`, the engine's ranks on gloo; None where the engine has one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_first = group is None or group.rank() == 0

    def rows(self, action: Callable[[], Sequence[Row]]) -> list[Row]:
        """What `action` returns on the first rank, where alone it is called, on every rank.

        One of ERRORS that it raises is raised on every rank. Collective over: the engine's ranks.
        """
        rows, error = self._attempt(action)
        if self.group is None:
            if error is not None:
                raise error
            return [*(rows or ())]
        return self._broadcast(rows or (), error)

    def together(self, action: Callable[[], object]) -> None:
        """As `rows`, for an `action` that returns nothing of interest. Collective over: the engine's ranks."""
        self.rows(lambda: (action(), ())[1])

    def wait(self, action: Callable[[Callable[[], None]], object], advance: Callable[[], None]) -> None:
        """As `together`, for an `action` that takes long: whenever it calls what it is given, `advance` is called on
        every rank. Collective over: the engine's ranks.
        """
        going_on = torch.ones(1, dtype=torch.int64)

        def advance_all() -> None:
            advance()
            if self.group is not None:
                dist.broadcast(going_on, group=self.group, group_src=0)

        _, error = self._attempt(lambda: action(advance_all))
        if self.group is not None:
            if self.is_first:
                dist.broadcast(torch.zeros_like(going_on), group=self.group, group_src=0)
            else:
                self._follow(going_on, advance)
        self._raise(error)

    def _follow(self, going_on: Tensor, advance: Callable[[], None]) -> None:
        while True:
            dist.broadcast(going_on, group=self.group, group_src=0)
            if not going_on:
                return
            advance()

    def _raise(self, error: Exception | None) -> None:
        if self.group is not None:
            self._broadcast((), error)
        elif error is not None:
            raise error

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        if not self.is_first:
            return None, None
        try:
            return action(), None
        except ERRORS as error:
            return None, error

    def _broadcast(self, rows: Sequence[Row], error: Exception | None) -> list[Row]:
        kind = 1 + next(i for i, one in enumerate(ERRORS) if isinstance(error, one)) if error else 0
        text = str(error).encode() if error else b""
        num_tokens = sum(len(row.drawn.tokens) for row in rows)
        header = torch.tensor([kind, len(text), len(rows), num_tokens])
        self._share(header)
        kind, num_bytes, num_rows, num_tokens = header.tolist()
        if kind:
            message = torch.tensor([*text], dtype=torch.uint8).resize_(num_bytes)
            self._share(message)
            raise error or ERRORS[kind - 1](bytes(message.tolist()).decode())
        if not num_rows or self.group is None:
            return [*rows]
        table = torch.zeros(num_rows, 3, dtype=torch.int64)
        tokens = torch.zeros(2, num_tokens, dtype=torch.int64)
        logprobs = torch.zeros(num_tokens, dtype=torch.float64)
        if self.is_first:
            _fill(table, tokens, logprobs, rows)
        for tensor in (table, tokens, logprobs):
            self._share(tensor)
        return [*rows] if self.is_first else _read(table, tokens, logprobs)

    def _share(self, tensor: Tensor) -> None:
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=0)


def _fill(table: Tensor, tokens: Tensor, logprobs: Tensor, rows: Sequence[Row]) -> None:
    """Write `rows` to `table` [rows, (id, reason, tokens)], `tokens` [(token, version), tokens] and `logprobs`."""
    entries = [(row.id, _REASONS.index(row.finish_reason), len(row.drawn.tokens)) for row in rows]
    table.copy_(torch.tensor(entries))
    tokens[0] = torch.tensor([token for row in rows for token in row.drawn.tokens], dtype=torch.int64)
    tokens[1] = torch.tensor([version for row in rows for version in row.drawn.policy_versions], dtype=torch.int64)
    logprobs.copy_(torch.tensor([value for row in rows for value in row.drawn.logprobs], dtype=torch.float64))


def _read(table: Tensor, tokens: Tensor, logprobs: Tensor) -> list[Row]:
    """The inverse of `_fill`."""
    drawn, versions, values = tokens[0].tolist(), tokens[1].tolist(), logprobs.tolist()
    rows, start = [], 0
    for number, reason, count in table.tolist():
        span = slice(start, start + count)
        part = PartialResponse(tuple(drawn[span]), tuple(values[span]), tuple(versions[span]))
        rows.append(Row(number, part, _REASONS[reason]))
        start += count
    return rows
