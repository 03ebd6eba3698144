"""Several sources in one stream by weight: a pure function of the position, in which nothing is drawn at random but
the order within short blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rltrain.data.order import Order

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


class Mix(Order):
    """The rows of several sources, each in an order and in epochs of its own."""

    def __init__(
        self, orders: Sequence[Order], firsts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool
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
