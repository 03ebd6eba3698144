"""One rank's view of all heartbeats: for how long each of the others has shown no progress, or no beat at all."""

import threading
import time
from collections.abc import Callable, Collection

from rltrain.config.schema import Timeouts
from rltrain.liveness.heartbeat import Beat, Board
from rltrain.liveness.stall import RankStatus, Stall, find_stall

MOST_BETWEEN_LOOKS_S = 2.0
"""Whoever looks less often may not have run either, as where the whole machine stood still: more does not count as
silence of the others."""


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
        """Rank -> its last beat's number, and the seconds for which there has been no other."""
        self._looked_at: dict[int, float] = {}
        self._looking = threading.Lock()

    def look(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """How `ranks` stand now."""
        beats = self.board.read(list(ranks))
        now = self.clock()
        with self._looking:
            return {rank: self._status(beat, now) for rank, beat in sorted(beats.items())}

    def find_stall(self) -> Stall | None:
        """The stall of the job, or None while there is none."""
        return find_stall(self.look(self.ranks).values(), self.limits)

    def _status(self, beat: Beat, now: float) -> RankStatus:
        number, silent_s = self._seen.get(beat.rank, (-1, 0.0))
        since_last_look = min(now - self._looked_at.get(beat.rank, now), MOST_BETWEEN_LOOKS_S)
        silent_s = 0.0 if number != beat.alive else silent_s + since_last_look
        self._seen[beat.rank] = (beat.alive, silent_s)
        self._looked_at[beat.rank] = now
        return RankStatus(beat, still_s=beat.still_s + silent_s, silent_s=silent_s)
