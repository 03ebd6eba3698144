"""Which engine draws which prompt group. A group is named by its position in the stream of all prompts of the run."""

from typing import Protocol

import torch.distributed as dist


class Deal(Protocol):
    """One engine's hand."""

    def claim(self, room: int, horizon: int) -> list[int]:
        """Positions below `horizon` for this engine alone, which has room for so many more groups."""
        ...


class FixedDeal:
    """Position p goes to engine p mod num_engines, whatever the engines' speed: all of them at once, to be queued."""

    def __init__(self, engine: int, num_engines: int, start: int = 0) -> None:
        self.num_engines = num_engines
        self.next = start + (engine - start) % num_engines

    def claim(self, room: int, horizon: int) -> list[int]:
        claimed = list(range(self.next, horizon, self.num_engines))
        self.next += len(claimed) * self.num_engines
        return claimed


class SharedDeal:
    """Engines take the next position from a counter in the store whenever they have room: fast ones take more."""

    def __init__(self, store: dist.Store, start: int = 0) -> None:
        self.store = dist.PrefixStore("deal", store)
        self.start = start
        self.held: int | None = None
        """Taken, and beyond the horizon of the claim that took it."""

    def claim(self, room: int, horizon: int) -> list[int]:
        claimed: list[int] = []
        while len(claimed) < room:
            position = self._take() if self.held is None else self.held
            if position >= horizon:
                self.held = position
                break
            self.held = None
            claimed.append(position)
        return claimed

    def _take(self) -> int:
        return self.start + int(self.store.add("next", 1)) - 1
