"""One rank's view of all heartbeats: for how long each of the others has shown no progress, or no beat at all."""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from rltrain.cluster.heartbeat import Beat, Board
from rltrain.cluster.judgement import Stall, Standing, excuses, find_stall
from rltrain.config.schema import Timeouts


class Observer:
    """Clocks of machines differ: what passes since a beat is measured here, from when it was first seen.

    `members` are the ranks by role, for the tasks that several ranks join. For any thread.
    """

    def __init__(
        self,
        board: Board,
        num_ranks: int,
        limits: Timeouts,
        members: Mapping[str, Collection[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = board
        self.ranks = range(num_ranks)
        self.limits = limits
        self.members = members
        self.clock = clock
        self._seen: dict[int, tuple[int, float]] = {}
        self._excused_at: dict[int, float] = {}
        self._looking = threading.Lock()

    def look(self, ranks: Collection[int]) -> dict[int, Standing]:
        """How `ranks` stand now."""
        beats = self.board.read(list(ranks))
        now = self.clock()
        with self._looking:
            return {rank: self._standing(beat, now) for rank, beat in sorted(beats.items())}

    def find_stall(self, concerned: Iterable[int] | None = None) -> Stall | None:
        """The stall of any of the `concerned` ranks (None: of all), or None while there is none.

        To be called every few seconds: what it saw before tells who just waited for others.
        """
        standings = self.look(self.ranks)
        now = self.clock()
        with self._looking:
            for rank, seconds in excuses(standings, self.members, self.limits).items():
                self._excused_at[rank] = max(now - seconds, self._excused_at.get(rank, -math.inf))
            standings = {
                rank: replace(standing, excused_s=now - self._excused_at.get(rank, -math.inf))
                for rank, standing in standings.items()
            }
        return find_stall(standings, self.members, self.limits, concerned)

    def _standing(self, beat: Beat, now: float) -> Standing:
        number, first_seen = self._seen.get(beat.rank, (-1, now))
        if number != beat.alive:
            self._seen[beat.rank] = (beat.alive, now)
            first_seen = now
        silent_s = now - first_seen
        return Standing(beat, still_s=beat.still_s + silent_s, silent_s=silent_s)
