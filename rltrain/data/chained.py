"""Sequences one after the other, as one."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rltrain.data.computed_sequence import ComputedSequence, Item


class Chained(ComputedSequence[Item]):
    """Nothing is copied; an item is asked for where it stands."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts = parts
        self._firsts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def item(self, index: int) -> Item:
        part = bisect_right(self._firsts, index) - 1
        return self.parts[part][index - self._firsts[part]]
