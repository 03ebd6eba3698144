"""Conversations that are to go on while the engine has no slot for them: which of them is next."""

import heapq
from collections.abc import Iterable

from rltrain.rollout.sample import Sample


class ReadySamples:
    """Those with the fewest turns made come first. They have most before them, so that conversations come to their
    ends together, and environments' steps lie beside decode steps for longer: what nothing overlaps are the last ones.

    A turn made counts as much as `spread` samples that have come since. So whoever waits with t turns made is overtaken
    by at most t * spread others, however many still come.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Sample]] = []
        """(when its turn is, its number among all that ever came, sample)."""
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, samples: Iterable[Sample], spread: int) -> None:
        for sample in samples:
            heapq.heappush(self._queue, (self._num_ever + spread * len(sample.turns), self._num_ever, sample))
            self._num_ever += 1

    def take(self, count: int) -> list[Sample]:
        """The next ones, at most so many."""
        return [heapq.heappop(self._queue)[-1] for _ in range(min(count, len(self._queue)))]
