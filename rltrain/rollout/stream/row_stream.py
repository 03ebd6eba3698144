"""Which row of the training prompts stands at which position of the stream, as every rank of the rollout has it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from rltrain.checkpoint.run_files import Contents
from rltrain.data.order import Order, Outcomes, SolvedRateOrder
from rltrain.errors import CheckpointError
from rltrain.rollout.stream.outcome_log import OutcomeLog
from rltrain.rollout.stream.rollout_state import Consumed
from rltrain.runtime.job_store import Waiter, poll, poll_s

Serve = Callable[[], None] | None


class RowStream(Protocol):
    """All ranks have the same row at a position, whenever they ask."""

    def begin(self, step: int, consumed: Consumed, done: Consumed, serve: Serve) -> None:
        """The step's generate task begins, when all engines together have `consumed` this of the stream. Nobody will
        ask for the rows at positions that are `done`."""
        ...

    def row(self, position: int) -> int: ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> Contents | None:
        """For `resume` on all ranks."""
        ...


class FixedRows:
    """A function of the position alone, whose first row stands at position `first`."""

    def __init__(self, order: Order, first: int = 0) -> None:
        self.order, self.first = order, first

    def begin(self, step: int, consumed: Consumed, done: Consumed, serve: Serve) -> None:
        """Nothing changes."""

    def row(self, position: int) -> int:
        return self.order.row(position - self.first)

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Contents | None:
        return None


class SolvedRateRows:
    """By how often prompts are solved. Windows of as many positions as a step takes are drawn one after the other, each
    when the first of its positions is begun on any engine, in the generate task of step g, say: from the outcomes of
    all steps up to g - lead - 1, which training has left behind by then in every order. Which g that was, ranks agree
    on through the store; what follows from it each rank works out.
    """

    def __init__(
        self, order: SolvedRateOrder, log: OutcomeLog, *, lead: int, scoring: int, waiter: Waiter, first_window: int
    ) -> None:
        """`scoring` is the rank that tells outcomes. The stream begins with window `first_window`."""
        self.order, self.log, self.lead, self.scoring, self.waiter = order, log, lead, scoring, waiter
        self.order.begin_at(first_window)
        self.step = first_window
        self.num_read = first_window
        """Steps before this one have been read, or were never told."""
        self.unheeded: dict[int, Outcomes] = {}
        """Of these, those that no window was drawn from yet."""

    def begin(self, step: int, consumed: Consumed, done: Consumed, serve: Serve) -> None:
        self.step = step
        self._read_before(step - self.lead, serve)
        begun = max((consumed.below - 1, *consumed.beyond))
        self._draw_through(begun // self.order.per_window)
        self.order.forget_before(done.below // self.order.per_window)

    def row(self, position: int) -> int:
        self._draw_through(position // self.order.per_window)
        return self.order.row(position)

    def metrics(self) -> dict[str, float]:
        return self.order.rates.metrics()

    def _draw_through(self, window: int) -> None:
        while self.order.next_window <= window:
            end = self.log.agree(self.order.next_window, self.step) - self.lead
            self._read_before(end, None)  # another rank has, if it is ahead of this one
            for step in sorted(step for step in self.unheeded if step < end):
                self.order.learn(self.unheeded.pop(step))
            self.order.draw()

    def _read_before(self, end: int, serve: Serve) -> None:
        while self.num_read < end:
            what = f"the rewards of step {self.num_read}"
            every_s = poll_s(self.log.num_readers)
            poll(self.waiter, lambda: self.log.has(self.num_read) or None, what, [self.scoring], serve, every_s)
            self.unheeded[self.num_read] = self.log.read(self.num_read)
            self.num_read += 1

    def state(self) -> Contents | None:
        """Tensors [rows] of what is known, and [windows, per_window] of what is drawn."""
        order = self.order
        windows = np.array([*order.windows.values()], np.int64).reshape(-1, order.per_window)
        unheeded = {step: [[row, *counts] for row, counts in of.items()] for step, of in self.unheeded.items()}
        tensors = {
            "rates": torch.from_numpy(order.rates.rates.copy()),
            "streaks": torch.from_numpy(order.rates.streaks.copy()),
            "places": torch.tensor(order.places),
            "windows": torch.from_numpy(windows),
            "window_numbers": torch.tensor([*order.windows], dtype=torch.int64),
            "next": torch.tensor([order.next_window, self.num_read]),
            "unheeded": torch.tensor([*json.dumps(unheeded).encode()], dtype=torch.uint8),
        }
        return Contents(tensors, {})

    def resume(self, saved: Sequence[Contents]) -> None:
        """Go on with what the engines of a run have left, of whom the one that has drawn most knows what the others do.
        CheckpointError where it is of other rows.
        """
        tensors: Mapping[str, torch.Tensor] = max((one.tensors for one in saved), key=lambda of: int(of["next"][0]))
        order, rates = self.order, self.order.rates
        num_rows, num_places = len(tensors["rates"]), len(tensors["places"])
        if num_rows != len(rates.rates) or num_places != len(order.places):
            raise CheckpointError(
                f"The checkpoint knows how often prompts of {num_rows} rows in {num_places} sources are solved; "
                f"data.train has {len(rates.rates)} rows in {len(order.places)}. Go on with the data that it was "
                "saved with, or without data.solved_rate."
            )
        rates.rates, rates.streaks = tensors["rates"].numpy().copy(), tensors["streaks"].numpy().copy()
        order.places = tensors["places"].tolist()
        unheeded = json.loads(bytes(tensors["unheeded"].tolist()))
        self.unheeded = {int(step): {row: (s, n) for row, s, n in of} for step, of in unheeded.items()}
        next_window, self.num_read = tensors["next"].tolist()
        numbers, windows = tensors["window_numbers"].tolist(), tensors["windows"].numpy()
        order.windows = dict(zip(numbers, windows, strict=True))
        order.next_window = next_window
