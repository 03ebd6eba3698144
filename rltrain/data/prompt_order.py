"""Orders of rows for the stream of training prompts: shuffled, mixed, by curriculum and by solved rate. All are pure
functions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from rltrain.config import schema
from rltrain.data.prompts import Difficulties, PromptDataset

# A permutation of many numbers that is computed instead of held in memory.

ROUNDS = 8
Numbers = npt.NDArray[np.uint64]


class FeistelPermutation:
    """A permutation of the numbers from 0 to `size` - 1.

    A Feistel network of ROUNDS rounds permutes the numbers below the next power of four. It is applied again to results
    of `size` and above (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). On average it
    is applied less than four times.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        """`key` selects a permutation of this size. Its numbers are not negative and can have any size."""
        if size < 1:
            raise ValueError(f"a permutation needs numbers, got size={size}")
        self.size = size
        num_bits = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(num_bits), np.uint64(2**num_bits - 1)
        self._keys = np.random.SeedSequence([*key, size]).generate_state(ROUNDS, np.uint64)

    def of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the images of `numbers`, all below `size`, in the same shape."""
        found = self._network(numbers.astype(np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, numbers: Numbers) -> Numbers:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return (left << self._half) | right


def _mixed(values: Numbers) -> Numbers:
    """Mixes bits: each bit of a value changes every bit of the result with a chance of nearly a half.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
    Products keep their lowest 64 bits.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# The stream of prompts of a run. It is a pure function of the seed, so a resumed run needs no state.

KEPT_EPOCHS = 2
HELD_ROWS = 2**20
"""Largest number of rows with their order in memory. The order of more rows is computed at each position."""
COMPUTED_ROWS = 2**10
"""Neighbouring positions that are computed together, because they are mostly used together."""


class RowOrder(ABC):
    """An order of rows in the stream. Step k uses the positions from k * prompts_per_step on."""

    @abstractmethod
    def row(self, position: int) -> int:
        """Returns the row at a position 0, 1, ... without an end."""

    def rows_for_step(self, step: int, prompts_per_step: int) -> list[int]:
        """Returns the rows of a step 0, 1, ...: prompts_per_step of them."""
        first = step * prompts_per_step
        return [self.row(position) for position in range(first, first + prompts_per_step)]


class PromptOrder(RowOrder):
    """An order of rows in successive epochs, each in another order if shuffled.

    Steps may cross epochs. A row comes twice in a step only if an epoch ends within it.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, stream: tuple[int, ...] = ()) -> None:
        """`stream` selects one of the orders of a seed."""
        if num_rows < 1:
            raise ValueError(f"an order needs rows, got num_rows={num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.stream = stream
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}
        self._computed: tuple[int, npt.NDArray[np.int64]] = -1, np.arange(0)

    def row(self, position: int) -> int:
        if self.shuffle and self.num_rows > HELD_ROWS:
            block, offset = divmod(position, COMPUTED_ROWS)
            if block != self._computed[0]:
                self._computed = block, self.rows(block * COMPUTED_ROWS, COMPUTED_ROWS)
            return int(self._computed[1][offset])
        epoch, index = divmod(position, self.num_rows)
        return int(self._permutation(epoch)[index]) if self.shuffle else index

    def rows(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Returns the rows at positions from `first` on, shape [count]."""
        epochs, places = np.divmod(np.arange(first, first + count), self.num_rows)
        if self.shuffle:
            for epoch in range(first // self.num_rows, (first + max(count, 1) - 1) // self.num_rows + 1):
                places[epochs == epoch] = self._permuted(epoch, places[epochs == epoch])
        return places

    def _permuted(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the rows at these places of an epoch."""
        if self.num_rows > HELD_ROWS:
            return FeistelPermutation(self.num_rows, (self.seed, epoch, *self.stream)).of(places)
        return self._permutation(epoch)[places]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            if len(self._epochs) == KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch, *self.stream]).permutation(self.num_rows)
        return self._epochs[epoch]


# Several sources in one stream by weight. It is a pure function of the position. Only the order within short blocks is
# random.

BLOCK = 64
"""Number of positions shuffled among each other. A source's share of a block follows its weight. The error is at most 1
for every halving of the list of sources on the way to it."""


class Shares:
    """A division of 0, 1, 2, ... among sources, as evenly as possible. Exact for all weights and numbers."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are above 0. They are exact as written in decimals: 0.1 is a tenth."""
        exact = [Fraction(repr(weight)) for weight in weights]
        sums = [sum(exact[:end], Fraction(0)) for end in range(len(exact) + 1)]
        self._num_sources = len(exact)
        self._first_halves = {
            (low, high): (sums[(low + high) // 2] - sums[low]) / (sums[high] - sums[low])
            for low, high in _halved(0, len(exact))
        }
        """The share of the first half of sources `low` to `high` in all of these."""

    def source(self, number: int) -> tuple[int, int]:
        """Returns the source of a number, and the count of lower numbers with this source."""
        low, high = 0, self._num_sources
        while high - low > 1:
            share, middle = self._first_halves[low, high], (low + high) // 2
            before, after = _times(number, share), _times(number + 1, share)
            if after > before:
                high, number = middle, before
            else:
                low, number = middle, number - before
        return low, number


def _halved(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yields the range, its halves, their halves and so on, as long as a range has two elements."""
    if high - low > 1:
        middle = (low + high) // 2
        yield low, high
        yield from _halved(low, middle)
        yield from _halved(middle, high)


def _times(number: int, share: Fraction) -> int:
    """Returns number * share, rounded."""
    return (2 * number * share.numerator + share.denominator) // (2 * share.denominator)


class Mix(RowOrder):
    """The rows of several sources. Each source has its order and its epochs."""

    def __init__(
        self, orders: Sequence[RowOrder], firsts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool
    ) -> None:
        """`firsts` has the number to add to the rows of each source's order."""
        self.orders, self.firsts = orders, firsts
        self.shares, self.seed, self.shuffle = Shares(weights), seed, shuffle
        self._block = _Block(-1, ())

    def row(self, position: int) -> int:
        source, index = self.place(position)
        return self.firsts[source] + self.orders[source].row(index)

    def place(self, position: int) -> tuple[int, int]:
        """Returns (source, position in the source's stream) at a position of the mix."""
        number, offset = divmod(position, BLOCK)
        if number != self._block.number:
            self._block = _Block(number, self._places(number))
        return self._block.places[offset]

    def _places(self, block: int) -> tuple[tuple[int, int], ...]:
        """Returns the places of a block. The sources are shuffled within it, and each source keeps its order."""
        places = [self.shares.source(number) for number in range(block * BLOCK, (block + 1) * BLOCK)]
        if not self.shuffle:
            return tuple(places)
        order = np.random.default_rng([self.seed, block, BLOCK, len(self.orders)]).permutation(BLOCK)
        following: dict[int, list[int]] = {}
        for source, index in reversed(places):
            following.setdefault(source, []).append(index)
        return tuple((places[i][0], following[places[i][0]].pop()) for i in order)


@dataclass(frozen=True)
class _Block:
    number: int
    places: tuple[tuple[int, int], ...]


# From easy to hard over the first steps. Like every order, it is a pure function of the position.


class CurriculumOrder(RowOrder):
    """An order by difficulty in the first steps, then another order from its beginning.

    Each of the first steps takes rows of a window. The window slides over all rows, sorted by difficulty. The rows of a
    step are different if there are enough. If the steps take as many rows as there are, each row comes once. They are
    then sorted, except within a step.
    """

    def __init__(
        self,
        difficulties: npt.NDArray[np.float64],
        *,
        steps: int,
        per_step: int,
        seed: int,
        shuffle: bool,
        then: RowOrder,
    ) -> None:
        """`difficulties` have shape [rows]; ties keep the rows' order. `per_step` is the number of positions
        of a step."""
        self.sorted = np.argsort(difficulties, kind="stable")
        self.steps, self.per_step, self.seed, self.shuffle, self.then = steps, per_step, seed, shuffle, then
        self.window = min(len(difficulties), max(-(-len(difficulties) // steps), per_step))
        self._drawn: tuple[int, npt.NDArray[np.int64]] = (-1, np.arange(0))

    def row(self, position: int) -> int:
        step, offset = divmod(position, self.per_step)
        if step >= self.steps:
            return self.then.row(position - self.steps * self.per_step)
        if self._drawn[0] != step:
            self._drawn = step, self._draw(step)
        return int(self._drawn[1][offset % self.window])

    def _draw(self, step: int) -> npt.NDArray[np.int64]:
        """Returns the rows of the step's window in the order of their use, shape [window]."""
        first = step * (len(self.sorted) - self.window) // max(self.steps - 1, 1)
        rows = self.sorted[first : first + self.window]
        return np.random.default_rng([self.seed, step, self.window]).permutation(rows) if self.shuffle else rows


# The order of a run's training prompts according to its config.


def prompt_order(dataset: PromptDataset, config: schema.Config) -> RowOrder:
    """Returns the order of the rows of data.train in `dataset`."""
    weights = [source.weight for source in dataset.sources if source.weight is not None]
    if not weights or len(dataset.sources) == 1:
        of_sources = [source.difficulties for source in dataset.sources]
        difficulties = of_sources[0] if len(of_sources) == 1 else np.concatenate(of_sources)
        return _of_rows(len(dataset), difficulties, config, 1.0, ())
    orders = [
        _of_rows(source.num_rows, source.difficulties, config, weight / sum(weights), (number,))
        for number, (source, weight) in enumerate(zip(dataset.sources, weights, strict=True))
    ]
    firsts = [source.first for source in dataset.sources]
    return Mix(orders, firsts, weights, seed=config.seed, shuffle=config.data.shuffle)


def _of_rows(
    num_rows: int, difficulties: Difficulties, config: schema.Config, share: float, stream: tuple[int, ...]
) -> RowOrder:
    """Returns the order of rows that make up about `share` of a step's prompts."""
    seed, shuffle, curriculum = config.seed, config.data.shuffle, config.data.curriculum
    order = PromptOrder(num_rows, seed=seed, shuffle=shuffle, stream=stream)
    if curriculum is None:
        return order
    return CurriculumOrder(
        difficulties if curriculum.easy == "low" else -difficulties,
        steps=curriculum.steps,
        per_step=max(1, round(config.batch.prompts_per_step * share)),
        seed=seed,
        shuffle=shuffle,
        then=order,
    )


# Known solved rates of a run's prompts, and how often to use the prompts again.

Outcomes = Mapping[int, tuple[int, int]]
"""Row -> (solved samples, generated samples) of a training step."""

Mask = npt.NDArray[np.bool_]


class SolvedRates:
    """The solved rates of `num_rows` rows. Arrays have shape [rows]."""

    def __init__(self, num_rows: int, settings: schema.SolvedRate) -> None:
        self.settings = settings
        self.rates = np.full(num_rows, np.nan)
        """Estimates. NaN for a row without a scored sample."""
        self.streaks = np.zeros(num_rows, np.int64)
        """Number of times in a row that all samples of the row solved it."""

    def learn(self, outcomes: Outcomes) -> None:
        """Updates the rates with the outcomes of a step."""
        memory = self.settings.memory
        for row, (solved, drawn) in sorted(outcomes.items()):
            rate, before = solved / drawn, self.rates[row]
            self.rates[row] = rate if np.isnan(before) else memory * before + (1 - memory) * rate
            self.streaks[row] = self.streaks[row] + 1 if solved == drawn else 0

    @property
    def is_retired(self) -> Mask:
        """Whether the row has been solved so often that it is not used any more."""
        after = self.settings.retire_after
        return np.zeros(len(self.rates), bool) if after is None else self.streaks >= after

    @property
    def is_wanted(self) -> Mask:
        """Whether the row is used each time its turn comes. Its rate is unknown or within the window."""
        rates = np.where(np.isnan(self.rates), self.settings.low, self.rates)
        return (rates >= self.settings.low) & (rates <= self.settings.high) & ~self.is_retired

    def metrics(self) -> dict[str, float]:
        """Returns the shares of rows by their solved rate."""
        is_known = ~np.isnan(self.rates)
        known, num_rows = self.rates[is_known], len(self.rates)
        too_hard, too_easy = (known < self.settings.low).sum(), (known > self.settings.high).sum()
        shares = {
            "unseen": num_rows - len(known),
            "too_hard": too_hard,
            "too_easy": too_easy,
            "in_window": len(known) - too_hard - too_easy,
        }
        return {
            **{f"curriculum/{name}": float(count / num_rows) for name, count in shares.items()},
            "curriculum/retired": float(self.is_retired.sum()),
            **({"curriculum/solved_rate_mean": float(known.mean())} if len(known) else {}),
        }


# The stream of prompts by solved rate. It is made window by window. Each window is a pure function of the seed and of
# the outcomes known when it is made.

Rows = npt.NDArray[np.int64]

EXCEPTIONS = 1
"""Part of the random seed for using unwanted rows. It separates these random numbers from others."""


class SolvedRateOrder:
    """An order of each source's rows, without a curriculum, that leaves out unwanted rows.

    A share of the unwanted rows is used all the same, to renew their rates. A source may have too few wanted rows for
    its part of a window, even with its next epoch. Then unwanted rows fill the part in the same order, retired ones
    last. So shares of sources are exact, and there always is a next prompt. A row comes twice in a window only if its
    source has fewer rows than the window takes.
    """

    def __init__(self, order: RowOrder, rates: SolvedRates, *, per_window: int, seed: int) -> None:
        """`order` is a PromptOrder of all rows, or a Mix of several sources."""
        self.order, self.rates, self.per_window, self.seed = order, rates, per_window, seed
        of_sources = order.orders if isinstance(order, Mix) else [order]
        self._orders = [of_source for of_source in of_sources if isinstance(of_source, PromptOrder)]
        assert len(self._orders) == len(of_sources), "a curriculum by a column is refused beside this one"
        self._firsts = order.firsts if isinstance(order, Mix) else [0]
        self.places = [0] * len(self._orders)
        """The next position in each source."""
        self.windows: dict[int, Rows] = {}
        """Rows of the windows made and not forgotten, by number of the window, shape [per_window]."""
        self.next_window = 0

    def row(self, position: int) -> int:
        """Returns the row at a position of the stream. Raises KeyError if its window does not exist."""
        window, offset = divmod(position, self.per_window)
        return int(self.windows[window][offset])

    def learn(self, outcomes: Outcomes) -> None:
        """Updates the rates for windows that are not made yet."""
        self.rates.learn(outcomes)

    def draw(self) -> None:
        """Makes the next window."""
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
        """Deletes earlier windows. Their positions are not needed any more."""
        self.windows = {number: rows for number, rows in self.windows.items() if number >= window}

    def begin_at(self, window: int) -> None:
        """Makes `window` the next one. Windows before it belong to another run."""
        self.windows, self.next_window = {}, window

    def _sources_of(self, window: int) -> Rows:
        """Returns the source of each position, shape [per_window]."""
        if not isinstance(self.order, Mix):
            return np.zeros(self.per_window, np.int64)
        positions = range(window * self.per_window, (window + 1) * self.per_window)
        return np.array([self.order.place(position)[0] for position in positions])

    def _draw_of(self, source: int, count: int, is_wanted: Mask, is_retired: Mask) -> Rows:
        """Returns rows of one source, numbered from its first row, shape [count]."""
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
    """Returns whether each place has the first occurrence of its row."""
    _, places = np.unique(rows, return_index=True)
    is_first = np.zeros(len(rows), bool)
    is_first[places] = True
    return is_first
