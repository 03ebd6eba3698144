"""A sequence of what is not held."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class ComputedSequence(Sequence[Item], ABC):
    """An item is made whenever it is asked for."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """That at `index`, 0 up to len(self)."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self.item(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.item(index % len(self))
