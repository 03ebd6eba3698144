"""Sequences one after the other, as one."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar, overload

Item = TypeVar("Item")


class Chained(Sequence[Item]):
    """Nothing is copied; an item is asked for where it stands."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts = parts
        self._firsts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = bisect_right(self._firsts, index) - 1
        return self.parts[part][index - self._firsts[part]]
