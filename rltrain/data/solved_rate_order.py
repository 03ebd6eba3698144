"""The stream of prompts where what is drawn depends on how often prompts are solved: window by window, each of them a
pure function of the seed and of the steps whose outcomes are known when it is drawn."""

import numpy as np
import numpy.typing as npt

from rltrain.data.mixing import Mix
from rltrain.data.order import Order, PromptOrder
from rltrain.data.solved_rates import Mask, Outcomes, SolvedRates

Rows = npt.NDArray[np.int64]

EXCEPTIONS = 1
"""Tells the random numbers that let others than the wanted rows be drawn from those of other purposes."""


class SolvedRateOrder:
    """Goes through the rows in an order without a curriculum, source by source, and leaves out those that are not
    wanted; a share of these comes all the same, so that what is known of them is renewed.

    Where a source has too few to fill its part of a window, going on through its next epoch, the others fill it, in the
    same order, retired ones last. So shares of sources are exact, a row comes twice in a window only where its
    source has fewer rows than that takes, and there always is a next prompt.
    """

    def __init__(self, order: Order, rates: SolvedRates, *, per_window: int, seed: int) -> None:
        """`order` is a PromptOrder of all rows, or a Mix of those of several sources."""
        self.order, self.rates, self.per_window, self.seed = order, rates, per_window, seed
        of_sources = order.orders if isinstance(order, Mix) else [order]
        self._orders = [of_source for of_source in of_sources if isinstance(of_source, PromptOrder)]
        assert len(self._orders) == len(of_sources), "a curriculum by a column is refused beside this one"
        self._firsts = order.firsts if isinstance(order, Mix) else [0]
        self.places = [0] * len(self._orders)
        """How far each source has been gone through."""
        self.windows: dict[int, Rows] = {}
        """Those that were drawn and not forgotten, by number: [per_window] rows."""
        self.next_window = 0

    def row(self, position: int) -> int:
        """The row at a position of the stream. KeyError where its window is not there."""
        window, offset = divmod(position, self.per_window)
        return int(self.windows[window][offset])

    def learn(self, outcomes: Outcomes) -> None:
        """For the windows that are drawn from now on."""
        self.rates.learn(outcomes)

    def draw(self) -> None:
        """The next window."""
        sources = self._sources_of(self.next_window)
        rows = np.empty(self.per_window, np.int64)
        is_wanted, is_retired = self.rates.is_wanted, self.rates.is_retired
        for source, (order, first) in enumerate(zip(self._orders, self._firsts, strict=True)):
            own = slice(first, first + order.num_rows)
            is_own = sources == source
            rows[is_own] = first + self._draw_of(source, int(is_own.sum()), is_wanted[own], is_retired[own])
        self.windows[self.next_window] = rows
        self.next_window += 1

    def forget_before(self, window: int) -> None:
        """Nobody asks for positions of earlier windows any more."""
        self.windows = {number: rows for number, rows in self.windows.items() if number >= window}

    def begin_at(self, window: int) -> None:
        """The next window is this one: those before are another run's."""
        self.windows, self.next_window = {}, window

    def _sources_of(self, window: int) -> Rows:
        """[per_window] the source of each position."""
        if not isinstance(self.order, Mix):
            return np.zeros(self.per_window, np.int64)
        positions = range(window * self.per_window, (window + 1) * self.per_window)
        return np.array([self.order.place(position)[0] for position in positions])

    def _draw_of(self, source: int, count: int, is_wanted: Mask, is_retired: Mask) -> Rows:
        """[count] rows of one source, numbered from its first one on."""
        random = np.random.default_rng([self.seed, self.next_window, source, EXCEPTIONS])
        drawn: list[Rows] = []
        while count > 0:
            place, num_rows = self.places[source], len(is_wanted)
            walked = self._orders[source].rows(place, 2 * num_rows - place % num_rows)
            is_exception = (random.random(len(walked)) < self.rates.settings.outside) & ~is_retired[walked]
            is_first = _first_ones(walked)
            takes = is_first & (is_wanted[walked] | is_exception)
            taken = np.flatnonzero(takes)[:count]
            if len(taken) == count:
                self.places[source] += int(taken[-1]) + 1
            else:
                others = np.flatnonzero(is_first & ~takes)
                others = others[np.argsort(is_retired[walked[others]], kind="stable")]
                taken = np.concatenate((taken, others[: count - len(taken)]))
                self.places[source] += len(walked)
            drawn.append(walked[taken])
            count -= len(taken)
        return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)


def _first_ones(rows: Rows) -> Mask:
    """Of each place whether its row has not come before."""
    _, places = np.unique(rows, return_index=True)
    is_first = np.zeros(len(rows), bool)
    is_first[places] = True
    return is_first
