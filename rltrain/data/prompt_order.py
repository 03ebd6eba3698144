"""The stream of training prompts: an order of rows, mixes, curricula and solved rates, each a pure function."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from rltrain.config import schema
from rltrain.data.prompts import Difficulties, PromptDataset

# A permutation of many numbers of which none is held: where each goes is computed.

ROUNDS = 8
Numbers = npt.NDArray[np.uint64]


class FeistelPermutation:
    """Of 0 up to `size`: a Feistel network of ROUNDS rounds permutes the numbers below the next power of four, and one
    that it takes past the last is taken on until it is not (cycle walking; Black and Rogaway, Ciphers with Arbitrary
    Finite Domains, 2002). That is less than four times on average."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        """`key`, numbers of any size that are not negative, tells permutations of one size apart."""
        if size < 1:
            raise ValueError(f"a permutation needs numbers, got size={size}")
        self.size = size
        num_bits = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(num_bits), np.uint64(2**num_bits - 1)
        self._keys = np.random.SeedSequence([*key, size]).generate_state(ROUNDS, np.uint64)

    def of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each of `numbers`, all below `size`, goes. Shapes are equal."""
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
    """Each bit of a value changes every bit with a chance of nearly a half: the finalizer of SplitMix64 (Steele, Lea
    and Flood, Fast Splittable Pseudorandom Number Generators, 2014). Products keep their lowest 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# The stream of prompts of a run: a pure function of the seed, so that a resumed run needs no state.

KEPT_EPOCHS = 2
HELD_ROWS = 2**20
"""Of more rows the order is not held: what stands where is computed."""
COMPUTED_ROWS = 2**10
"""Of neighbouring positions, which mostly are asked for together."""


class RowOrder(ABC):
    """Which row stands at which position of the stream; step k uses positions k * prompts_per_step and following."""

    @abstractmethod
    def row(self, position: int) -> int:
        """The row at this position, 0, 1, ... without an end."""

    def rows_for_step(self, step: int, prompts_per_step: int) -> list[int]:
        """[prompts_per_step] rows of step 0, 1, ..."""
        first = step * prompts_per_step
        return [self.row(position) for position in range(first, first + prompts_per_step)]


class PromptOrder(RowOrder):
    """Row numbers in epochs one after the other, each in an order of its own if shuffled. Steps may cross epochs: a row
    comes twice in a step only where an epoch ends within it."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, stream: tuple[int, ...] = ()) -> None:
        """`stream` tells orders of one seed apart."""
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
        """[count] the rows at `first` and the positions behind it."""
        epochs, places = np.divmod(np.arange(first, first + count), self.num_rows)
        if self.shuffle:
            for epoch in range(first // self.num_rows, (first + max(count, 1) - 1) // self.num_rows + 1):
                places[epochs == epoch] = self._permuted(epoch, places[epochs == epoch])
        return places

    def _permuted(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at these places of an epoch."""
        if self.num_rows > HELD_ROWS:
            return FeistelPermutation(self.num_rows, (self.seed, epoch, *self.stream)).of(places)
        return self._permutation(epoch)[places]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            if len(self._epochs) == KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch, *self.stream]).permutation(self.num_rows)
        return self._epochs[epoch]


# Several sources in one stream by weight: a pure function of the position, in which nothing is drawn at random but
# the order within short blocks.

BLOCK = 64
"""Positions that are shuffled among each other. A source's share of a block is what its weight says, within 1 for
every halving of the list of sources that leads to it."""


class Shares:
    """Divides 0, 1, 2, ... among sources as evenly as can be. Exact, whatever the weights and however far."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` above 0 are taken as they are written in decimals: 0.1 is a tenth."""
        exact = [Fraction(repr(weight)) for weight in weights]
        sums = [sum(exact[:end], Fraction(0)) for end in range(len(exact) + 1)]
        self._num_sources = len(exact)
        self._first_halves = {
            (low, high): (sums[(low + high) // 2] - sums[low]) / (sums[high] - sums[low])
            for low, high in _halved(0, len(exact))
        }
        """Of the share of sources `low` up to `high`, that of the first half of them."""

    def source(self, number: int) -> tuple[int, int]:
        """(the source that `number` falls to, how many numbers below have fallen to that source)."""
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
    """The range, its halves, theirs, and so on, as long as there are two in one."""
    if high - low > 1:
        middle = (low + high) // 2
        yield low, high
        yield from _halved(low, middle)
        yield from _halved(middle, high)


def _times(number: int, share: Fraction) -> int:
    """number * share, rounded."""
    return (2 * number * share.numerator + share.denominator) // (2 * share.denominator)


class Mix(RowOrder):
    """The rows of several sources, each in an order and in epochs of its own."""

    def __init__(
        self, orders: Sequence[RowOrder], firsts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool
    ) -> None:
        """`firsts` [sources] are added to the rows of the orders."""
        self.orders, self.firsts = orders, firsts
        self.shares, self.seed, self.shuffle = Shares(weights), seed, shuffle
        self._block = _Block(-1, ())

    def row(self, position: int) -> int:
        source, index = self.place(position)
        return self.firsts[source] + self.orders[source].row(index)

    def place(self, position: int) -> tuple[int, int]:
        """(source, the position in its own stream) at this position of the mix."""
        number, offset = divmod(position, BLOCK)
        if number != self._block.number:
            self._block = _Block(number, self._places(number))
        return self._block.places[offset]

    def _places(self, block: int) -> tuple[tuple[int, int], ...]:
        """Of the block's positions: which source comes where is shuffled, and each goes on in its own order."""
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


# From easy to hard over the first steps: a pure function of the position, as every order is.


class CurriculumOrder(RowOrder):
    """In each of the first steps rows of a window that slides over all of them, sorted by difficulty; then another
    order from its beginning.

    A step's rows differ from each other where there are enough. Where the steps take as many rows as there are, each
    comes once, in sorted order but for the order within a step.
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
        """`difficulties` [rows]; ties keep the rows' order. `per_step`: positions that a step takes."""
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
        """[window] the rows of the step's window, in the order in which they are taken."""
        first = step * (len(self.sorted) - self.window) // max(self.steps - 1, 1)
        rows = self.sorted[first : first + self.window]
        return np.random.default_rng([self.seed, step, self.window]).permutation(rows) if self.shuffle else rows


# The order of a run's training prompts, as its config asks for.


def prompt_order(dataset: PromptDataset, config: schema.Config) -> RowOrder:
    """Of the rows of data.train, which `dataset` has."""
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
    """Of rows of which a step takes about `share` of its prompts."""
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


# How often the prompts of a run are solved, as far as is known, and what follows for drawing them again.

Outcomes = Mapping[int, tuple[int, int]]
"""Row -> (samples that solve it, samples drawn of it), of a training step."""

Mask = npt.NDArray[np.bool_]


class SolvedRates:
    """Of `num_rows` rows. Arrays are [rows]."""

    def __init__(self, num_rows: int, settings: schema.SolvedRate) -> None:
        self.settings = settings
        self.rates = np.full(num_rows, np.nan)
        """Estimates; nan: no sample of the row was scored yet."""
        self.streaks = np.zeros(num_rows, np.int64)
        """Times in a row that all samples solved it."""

    def learn(self, outcomes: Outcomes) -> None:
        """What a step has shown."""
        memory = self.settings.memory
        for row, (solved, drawn) in sorted(outcomes.items()):
            rate, before = solved / drawn, self.rates[row]
            self.rates[row] = rate if np.isnan(before) else memory * before + (1 - memory) * rate
            self.streaks[row] = self.streaks[row] + 1 if solved == drawn else 0

    @property
    def is_retired(self) -> Mask:
        """Whether the row has been solved so often that it is not drawn any more."""
        after = self.settings.retire_after
        return np.zeros(len(self.rates), bool) if after is None else self.streaks >= after

    @property
    def is_wanted(self) -> Mask:
        """Whether the row is drawn each time that its turn comes: nothing is known of it, or its rate is in the
        window."""
        rates = np.where(np.isnan(self.rates), self.settings.low, self.rates)
        return (rates >= self.settings.low) & (rates <= self.settings.high) & ~self.is_retired

    def metrics(self) -> dict[str, float]:
        """Shares of the rows by what is known of them."""
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


# The stream of prompts where what is drawn depends on how often prompts are solved: window by window, each of them a
# pure function of the seed and of the steps whose outcomes are known when it is drawn.

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

    def __init__(self, order: RowOrder, rates: SolvedRates, *, per_window: int, seed: int) -> None:
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
