"""Which numbers of a range are multiples of which intervals: one number for each combination, without a walk along it.

A combination of intervals is due together at multiples of their least common multiple. So the work grows with the
number of combinations that occur in the range, and neither with its length nor with the intervals.
"""

from collections.abc import Collection, Iterator
from math import lcm


def first_of_each_kind(numbers: range, intervals: Collection[int]) -> Iterator[int]:
    """The first of `numbers` at which just these of `intervals` are due, for every combination that occurs; ascending.

    An interval is due at its multiples. The intervals are positive, and `numbers` has a step of 1.
    """
    if not numbers:
        return
    yield numbers[0]
    found = (_first_exactly_at(numbers, common, intervals) for common in _common_multiples(numbers, intervals))
    yield from sorted({number for number in found if number is not None} - {numbers[0]})


def count_of_each_kind(numbers: range, intervals: Collection[int]) -> dict[int, int]:
    """The numbers that `first_of_each_kind` yields, each with how many of `numbers` have its combination."""
    counts: dict[int, int] = {}
    for common in sorted(_common_multiples(numbers, intervals), reverse=True):
        with_more = sum(count for other, count in counts.items() if other % common == 0)
        counts[common] = len(_multiples_in(numbers, common)) - with_more
    firsts = {common: _first_exactly_at(numbers, common, intervals) for common, count in counts.items() if count}
    return {first: counts[common] for common, first in firsts.items() if first is not None}


def _common_multiples(numbers: range, intervals: Collection[int]) -> set[int]:
    """The least common multiple of every combination of intervals that are due together somewhere in `numbers`."""
    found = {1} if numbers else set()
    for interval in intervals:
        found |= {common for one in found if _multiples_in(numbers, common := lcm(one, interval))}
    return found


def _multiples_in(numbers: range, interval: int) -> range:
    return range(-(-numbers.start // interval) * interval, numbers.stop, interval)


def _first_exactly_at(numbers: range, common: int, intervals: Collection[int]) -> int | None:
    """The first multiple of `common` at which no interval is due that does not divide it."""
    others = [interval for interval in intervals if common % interval]
    return next((n for n in _multiples_in(numbers, common) if all(n % other for other in others)), None)
