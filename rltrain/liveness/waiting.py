"""Waits with a limit and a name: what they wait for is reported, and the limit runs while the others do not get on."""

import logging
import time
from collections.abc import Callable, Sequence

from rltrain.errors import StallError
from rltrain.liveness.job_store import LOOK_S, JobStore
from rltrain.liveness.stall import what_it_does

logger = logging.getLogger(__name__)

SERVE_S = 0.005
"""Between two calls of `serve`."""


MOST_DESCRIBED = 8
"""Ranks of which a report says what they do: the heartbeats of all of them are for one rank to read."""


class Waiter:
    """How this rank waits for others, and reports what they do every `report_s`. For one thread at a time."""

    def __init__(self, job_store: JobStore, report_s: float) -> None:
        self.job_store = job_store
        self.rank = job_store.world.rank
        self.report_s = report_s
        self.meanwhile: Callable[[], None] = lambda: None
        """Called every LOOK_S seconds of a wait, and by tasks that take long. It may not wait itself."""

    def until(
        self,
        arrived: Callable[[float], bool],
        what: str,
        ranks: Sequence[int],
        serve: Callable[[], None] | None = None,
    ) -> None:
        """Call `arrived(seconds)`, which waits that long at most and says whether it is done, until it is.

        `ranks` are those waited for, none for any other. `serve` is called in between, every few milliseconds: what
        this rank does meanwhile, for others that need it. Raises StallError when nobody in the job has shown
        progress for longer than `timeouts` allows; in a guarded job the watchdog ends the process instead. Also where
        `arrived` raises ConnectionError.
        """
        try:
            self._until(arrived, what, ranks, serve)
        except ConnectionError as error:
            raise StallError(f"{self._describe(what, ranks)}: the connection broke: {error}") from error

    def _until(
        self,
        arrived: Callable[[float], bool],
        what: str,
        ranks: Sequence[int],
        serve: Callable[[], None] | None,
    ) -> None:
        if arrived(0.0):
            return
        look_s = min(LOOK_S, self.report_s)
        start = last_look = last_report = time.monotonic()
        with self.job_store.heartbeat.waiting(what, ranks):
            while not arrived(SERVE_S if serve else look_s):
                if serve:
                    serve()
                now = time.monotonic()
                if now - last_report >= self.report_s:
                    last_report = now
                    logger.warning(f"{self._describe(what, ranks)} for {now - start:.0f} s")
                if now - last_look >= look_s:
                    last_look = now
                    self.meanwhile()
                    self.job_store.end_wait_in_vain(lambda: self._describe(what, ranks))

    def _describe(self, what: str, ranks: Sequence[int]) -> str:
        others = ranks or [rank for rank in range(self.job_store.world.size) if rank != self.rank]
        beats = self.job_store.heartbeat.board.read(others[:MOST_DESCRIBED])
        activity = [f"rank {rank} {what_it_does(beat)}" for rank, beat in sorted(beats.items())]
        more = [f"and {len(others) - len(beats)} more ranks"] if len(others) > len(beats) else []
        return f"rank {self.rank} waits at {what}: {'; '.join([*activity, *more])}"
