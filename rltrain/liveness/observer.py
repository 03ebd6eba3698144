"""One rank's view of all heartbeats: for how long each of the others has shown no progress, or no beat at all."""

import threading
import time
from collections.abc import Callable, Collection

from rltrain.config.schema import Timeouts
from rltrain.liveness.heartbeat import Board, Posted
from rltrain.liveness.stall import Lost, RankStatus, Stall, find_stall, forbids_a_stall
from rltrain.system.processes import has_ended

MOST_BETWEEN_LOOKS_S = 2.0
"""Whoever looks less often may not have run either, as where the whole machine stood still: more does not count as
silence of the others."""
GONE_S = 10.0
"""A rank of another machine without a heartbeat for this long is gone for one that is about to end itself; for a job
that goes on it is lost after timeouts.lost_s."""
Seen = dict[int, tuple[Posted, float]]
"""By rank: its beat, and for how many seconds there has been no other."""


class Observer:
    """Clocks of machines differ: what passes since a beat is measured here, from when it was first seen.

    To be asked every second or so. For any thread.
    """

    def __init__(
        self, board: Board, num_ranks: int, limits: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self.ranks = range(num_ranks)
        self.limits = limits
        self.clock = clock
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> its last beat's number, and `_looked_for_s` when that was new."""
        self._looked_at: float | None = None
        self._looked_for_s = 0.0
        """Seconds in which this process is known to have run."""
        self._looking = threading.Lock()
        self._witness = 0
        """The rank whose beat was the last to show that there is no stall."""

    def look(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """How `ranks` stand now."""
        seen = self._see(ranks)
        return {rank: _status(*seen[rank]) for rank in sorted(seen)}

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Those of `ranks` whose process has ended, or is not heard of any more, before they had done their part."""
        statuses = self.look(ranks)
        ended = [rank for rank, status in statuses.items() if has_ended(status.beat.process)]
        statuses |= self.look(ended)  # what they said last: one that has just finished is not gone
        return [
            rank
            for rank, status in statuses.items()
            if (rank in ended or status.silent_s > GONE_S) and not status.beat.finished
        ]

    def verdict(self) -> Stall | Lost | None:
        """Why the job is to end: the stall of all ranks, or that one is lost, whatever the others do; else None.

        Beats are read to the end until one of them rules a stall out: usually the one that did so last time.
        """
        seen = self._see(self.ranks)
        return self._stall(seen) or self._lost(seen)

    def _stall(self, seen: Seen) -> Stall | None:
        statuses = dict[int, RankStatus]()
        for rank in (self._witness, *self.ranks):
            status = statuses[rank] = _status(*seen[rank])
            if forbids_a_stall(status, self.limits):
                self._witness = rank
                return None
        return find_stall(statuses.values(), self.limits)

    def _lost(self, seen: Seen) -> Lost | None:
        for posted, silent_s in seen.values():
            if posted.alive and silent_s > self.limits.lost_s and not posted.beat().finished:
                return Lost(_status(posted, silent_s), self.limits.lost_s)
        return None

    def _see(self, ranks: Collection[int]) -> Seen:
        found = self.board.posted(list(ranks))
        with self._looking:
            now = self.clock()
            if self._looked_at is not None:
                self._looked_for_s += min(now - self._looked_at, MOST_BETWEEN_LOOKS_S)
            self._looked_at = now
            return {posted.rank: (posted, self._silent_s(posted)) for posted in found}

    def _silent_s(self, posted: Posted) -> float:
        number, new_at = self._seen.get(posted.rank, (-1, 0.0))
        if number != posted.alive:
            new_at = self._looked_for_s
            self._seen[posted.rank] = (posted.alive, new_at)
        return self._looked_for_s - new_at


def _status(posted: Posted, silent_s: float) -> RankStatus:
    beat = posted.beat()
    return RankStatus(beat, still_s=beat.still_s + silent_s, silent_s=silent_s)
