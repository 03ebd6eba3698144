"""The order of tasks: one list, equal on every rank.

A rank executes the entries of its roles in this order and skips the rest. A transfer of experience has two ends: a post
by the source role and a later wait by the destination role. A task of several roles is one entry. All their ranks join
it.
"""

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Literal

from rltrain.runtime.placement import Placement

# Combinations of intervals inside a range of numbers.
#
# Several intervals are due together at the multiples of their least common multiple. So the work grows with the number
# of combinations in the range. It depends neither on the length of the range nor on the intervals.


def first_of_each_kind(numbers: range, intervals: Collection[int]) -> Iterator[int]:
    """Yields, for every combination of `intervals`, the first of `numbers` at which exactly these are due. Ascending.

    An interval is due at its multiples. The intervals are positive, and `numbers` has a step of 1.
    """
    if not numbers:
        return
    yield numbers[0]
    found = (_first_exactly_at(numbers, common, intervals) for common in _common_multiples(numbers, intervals))
    yield from sorted({number for number in found if number is not None} - {numbers[0]})


def count_of_each_kind(numbers: range, intervals: Collection[int]) -> dict[int, int]:
    """Returns the numbers of `first_of_each_kind`, each with the count of `numbers` of the same combination."""
    counts: dict[int, int] = {}
    for common in sorted(_common_multiples(numbers, intervals), reverse=True):
        with_more = sum(count for other, count in counts.items() if other % common == 0)
        counts[common] = len(_multiples_in(numbers, common)) - with_more
    firsts = {common: _first_exactly_at(numbers, common, intervals) for common, count in counts.items() if count}
    return {first: counts[common] for common, first in firsts.items() if first is not None}


def _common_multiples(numbers: range, intervals: Collection[int]) -> set[int]:
    """Returns the least common multiple of every combination of intervals due together somewhere in `numbers`."""
    found = {1} if numbers else set()
    for interval in intervals:
        found |= {common for one in found if _multiples_in(numbers, common := lcm(one, interval))}
    return found


def _multiples_in(numbers: range, interval: int) -> range:
    return range(-(-numbers.start // interval) * interval, numbers.stop, interval)


def _first_exactly_at(numbers: range, common: int, intervals: Collection[int]) -> int | None:
    """Returns the first multiple of `common` at which only divisors of `common` are due, or None."""
    others = [interval for interval in intervals if common % interval]
    return next((n for n in _multiples_in(numbers, common) if all(n % other for other in others)), None)


WEIGHT_SYNC = "weight_sync"
SYNC_EVALUATION = "sync_evaluation"
CHECKPOINT = "checkpoint"
SAME_WEIGHTS = ("generate_evaluation",)
LOAD_WEIGHTS = "load_weights"

ITERATIONS_KEPT = 64

Transfer = tuple[str, str, str, int, int]
"""Name, source role, destination role, step and chunk. A post and its wait share these."""


@dataclass(frozen=True)
class Entry:
    """One position of the order.

    A `task` is the method `name` of every role in `roles`. A `post` and a `wait` are the two ends of the transfer
    `name` from `roles[0]` to `roles[1]`. `chunk` is the part of the step, or for an evaluation the number of its set.
    Entries with `final` run even if training has ended early.
    """

    kind: Literal["task", "post", "wait"]
    name: str
    roles: tuple[str, ...]
    step: int
    chunk: int = 0
    final: bool = False

    @property
    def actors(self) -> tuple[str, ...]:
        """The roles whose ranks execute this entry."""
        return {"task": self.roles, "post": self.roles[:1], "wait": self.roles[1:]}[self.kind]

    @property
    def transfer(self) -> Transfer:
        return (self.name, self.roles[0], self.roles[1], self.step, self.chunk)

    def __str__(self) -> str:
        arrow = " -> ".join(self.roles) if self.kind != "task" else "+".join(self.roles)
        part = f"{self.step}.{self.chunk}" if self.chunk else str(self.step)
        return f"{self.kind + ' ' if self.kind != 'task' else ''}{self.name}[{part}] ({arrow})"


class Entries(list[Entry]):
    """A list of entries with a method to append each kind."""

    def task(self, name: str, *roles: str, step: int, chunk: int = 0, final: bool = False) -> None:
        self.append(Entry("task", name, roles, step, chunk, final))

    def post(self, name: str, source: str, destination: str, step: int, chunk: int = 0) -> None:
        self.append(Entry("post", name, (source, destination), step, chunk))

    def wait(self, name: str, source: str, destination: str, step: int, chunk: int = 0) -> None:
        self.append(Entry("wait", name, (source, destination), step, chunk))


@dataclass(frozen=True)
class Iterations:
    """The iterations of an order, by their `numbers`. Entries of step s are in the iterations s - lead to s.

    Two iterations are of the same kind if no turn is above the first number and up to the second, and if the same
    `intervals` divide both. Their entries are equal except for the steps. The steps differ as the numbers do.
    """

    entries: Callable[[int], Sequence[Entry]]
    """Returns the entries of an iteration."""
    numbers: range
    lead: int = 0
    turns: frozenset[int] = frozenset()
    """Numbers at which the entries of iterations change for good."""
    intervals: frozenset[int] = frozenset()
    boundary: Callable[[int], int] = lambda number: 0
    """Returns how many entries of an iteration belong to the steps before it. A run can be cut after these."""
    saves: Callable[[int], bool] = lambda step: False
    """Returns whether a checkpoint is due at the boundary of a step."""

    def from_on(self, number: int) -> Iterator[int]:
        """Yields `number`, and after it the first number of every kind. Every kind of later entry occurs first in one
        of these."""
        if number in self.numbers:
            yield number
        for stretch in self.stretches(number + 1):
            yield from first_of_each_kind(stretch, self.intervals)

    def stretches(self, number: int) -> Iterator[range]:
        """Returns the numbers from `number` on, cut at every turn."""
        edges = sorted({number, self.numbers.stop, *(turn for turn in self.turns if turn > number)})
        return (range(begin, end) for begin, end in pairwise(edges) if end <= self.numbers.stop)


class Order:
    """The entries of a run, by position. Positions ascend, with gaps between iterations.

    Entries are made on access, so time and memory do not depend on the number of steps.

    A resumed run begins at a cut. `crossing` are the posts before the cut with their waits after it. They are executed
    first. `skipped` is the number of entries of the first iteration before the cut. They are left out.
    """

    def __init__(self, iterations: Iterations, crossing: Sequence[Entry] = (), skipped: int = 0) -> None:
        self.iterations = iterations
        self.first = iterations.numbers.start
        self._crossing, self._skipped = [*crossing], skipped
        self._iteration = lru_cache(maxsize=ITERATIONS_KEPT)(self._make)
        self._stride = max((len(self._make(number)) for number in iterations.from_on(self.first)), default=0) or 1

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Order":
        """Returns an order of just these entries, at positions 0, 1 and so on."""
        return cls(Iterations(lambda number: entries, range(1), lead=sys.maxsize))

    def __getitem__(self, position: int) -> Entry:
        number, index = divmod(position, self._stride)
        return self._iteration(self.first + number)[index]

    def __iter__(self) -> Iterator[Entry]:
        return (entry for _, entry in self.items())

    @property
    def end(self) -> int:
        """A position after all entries."""
        return len(self.iterations.numbers) * self._stride

    def items(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Entry]]:
        """Yields (position, entry) from position `begin` on, before position `end`."""
        return self._items(range(self._number(begin), self.iterations.numbers.stop), begin, end)

    def ahead(self, position: int) -> Iterator[tuple[int, Entry]]:
        """Yields (position, entry) after `position`. Later iterations of a kind already seen are left out."""
        return self._items(self.iterations.from_on(self._number(position + 1)), position + 1)

    def distinct(self) -> Iterator[Entry]:
        """Yields entries of some steps, among them every kind of entry of the run."""
        return (entry for _, entry in self.ahead(-1))

    def excerpt(self) -> list[Entry]:
        """Returns the entries of some steps, in their order. Used to check an order without building all of it.

        Every kind of iteration is in it, with the other entries of its steps. A transfer belongs to one step, so the
        excerpt of an order with a deadlock has the deadlock too.
        """
        found = dict(item for step in {entry.step for entry in self.distinct()} for item in self.of_step(step))
        return [found[position] for position in sorted(found)]

    def num_entries(self) -> int:
        """Returns the number of entries in the run."""
        kinds = [
            kind
            for stretch in self.iterations.stretches(self.first + 1)
            for kind in count_of_each_kind(stretch, self.iterations.intervals).items()
        ]
        return sum(count * len(self._iteration(number)) for number, count in [*kinds, (self.first, 1)])

    def of_step(self, step: int) -> Iterator[tuple[int, Entry]]:
        """Yields (position, entry) of one step."""
        last = min(step, self.iterations.numbers.stop - 1)
        numbers = range(max(self.first, step - self.iterations.lead), last + 1)
        return (item for item in self._items(numbers) if item[1].step == step)

    def final(self) -> Iterator[tuple[int, Entry]]:
        """Yields (position, entry) of the entries that run even if training has ended early. They are in the last
        iteration."""
        return (item for item in self._items(self.iterations.numbers[-1:]) if item[1].final)

    def wait_of(self, posted: int) -> int:
        """Returns the position of the wait for the transfer posted at `posted`."""
        transfer = self[posted].transfer
        return next(i for i, e in self.of_step(self[posted].step) if e.kind == "wait" and e.transfer == transfer)

    def post_of(self, awaited: int) -> int:
        """Returns the position of the post of the transfer awaited at `awaited`."""
        transfer = self[awaited].transfer
        return next(i for i, e in self.of_step(self[awaited].step) if e.kind == "post" and e.transfer == transfer)

    def boundary(self, step: int) -> int:
        """Returns the position of the cut before `step`. All entries before it belong to earlier steps."""
        index = self.iterations.boundary(step)
        if step == self.first:
            index += len(self._crossing) - self._skipped
        return (step - self.first) * self._stride + index

    def saves(self, step: int) -> bool:
        """Returns whether a checkpoint is due at the boundary of `step`."""
        return self.iterations.saves(step)

    def from_step(self, step: int) -> "Order":
        """Returns the rest of the run from the boundary of `step` on. It begins with the posts of all crossing
        experience."""
        rest = replace(self.iterations, numbers=range(step, self.iterations.numbers.stop))
        return Order(rest, [*self.crossing(self.boundary(step)).values()], self.iterations.boundary(step))

    def crossing(self, position: int) -> dict[int, Entry]:
        """Returns the posts before `position` whose waits come later, by their positions."""
        begin = (self._number(position) - self.iterations.lead - self.first) * self._stride
        posts = {i: entry for i, entry in self.items(max(begin, 0), position) if entry.kind == "post"}
        return {posted: entry for posted, entry in posts.items() if self.wait_of(posted) >= position}

    def digest(self) -> str:
        """Returns a hash of the order. Two ranks have equal digests if and only if their orders are equal."""
        made = self.iterations
        words = (made.numbers, sorted(made.turns), sorted(made.intervals), *self.distinct())
        return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()[:16]

    def syncs(self, name: str = WEIGHT_SYNC) -> Iterator[tuple[int, int]]:
        """Yields, for every sync called `name`, its position and the earliest position from which an engine may join
        it.

        An engine joins a weight sync only after the last evaluation or checkpoint before it. These need the weights of
        their place in the order. Weights for role evaluation are only stored until their turn, so engines may join at
        any time.
        """
        earliest = 0
        for position, entry in self.items():
            if name == WEIGHT_SYNC and (
                entry.name in SAME_WEIGHTS or (entry.name == CHECKPOINT and self.saves(entry.step))
            ):
                earliest = position + 1
            elif entry.name == name:
                yield position, earliest

    def _number(self, position: int) -> int:
        return self.first + max(position, 0) // self._stride

    def _items(self, numbers: Iterable[int], begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Entry]]:
        for number in numbers:
            start = (number - self.first) * self._stride
            for position, entry in enumerate(self._iteration(number), start):
                if end is not None and position >= end:
                    return
                if position >= begin:
                    yield position, entry

    def _make(self, number: int) -> list[Entry]:
        entries = [*self.iterations.entries(number)]
        return self._crossing + entries[self._skipped :] if number == self.first else entries


def program(order: Iterable[Entry], placement: Placement, rank: int) -> list[Entry]:
    """Returns the entries of `order` that `rank` executes."""
    hosted = set(placement.hosts(rank))
    return [entry for entry in order if hosted.intersection(entry.actors)]
