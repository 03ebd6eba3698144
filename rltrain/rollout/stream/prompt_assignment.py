"""Which engine draws which prompt group. A group is named by its position in the stream of all prompts of the run."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist


class PromptAssignment(Protocol):
    """One engine's share."""

    def claim(self, room: int, max_position: int) -> list[int]:
        """Positions below `max_position` for this engine alone, which has room for so many more groups."""
        ...


class StaticAssignment:
    """Position p goes to engine p mod num_engines, whatever the engines' speed: all of them at once, to be queued.

    A run that goes on does so at `start`, its engines beginning with positions before it that were `returned`.
    """

    def __init__(self, engine: int, num_engines: int, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.num_engines = num_engines
        self.next = start + (engine - start) % num_engines
        self.returned = [*returned]

    def claim(self, room: int, max_position: int) -> list[int]:
        dealt = range(self.next, max_position, self.num_engines)
        self.next += len(dealt) * self.num_engines
        claimed = [position for position in self.returned if position < max_position]
        self.returned = [position for position in self.returned if position >= max_position]
        return [*claimed, *dealt]


class SharedAssignment:
    """Engines take the next position from a counter in the store whenever they have room: fast ones take more.

    A run that goes on does so at `start`, this engine beginning with positions before it that were `returned`.
    """

    def __init__(self, store: dist.Store, start: int = 0, returned: Sequence[int] = ()) -> None:
        self.store = dist.PrefixStore("deal", store)
        self.start = start
        self.held = [*returned]
        """For this engine alone, and yet to be claimed: the last one lay beyond the max_position when it was taken."""

    def claim(self, room: int, max_position: int) -> list[int]:
        claimed: list[int] = []
        while len(claimed) < room:
            if not self.held:
                self.held = [self._take()]
            if self.held[0] >= max_position:
                break
            claimed.append(self.held.pop(0))
        return claimed

    def _take(self) -> int:
        return self.start + int(self.store.add("next", 1)) - 1
