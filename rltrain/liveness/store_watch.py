"""Ends a rank that the job's store answers no more, as behind a cable that was cut: no call of it would ever return."""

import os
import platform
import sys
import threading
from collections.abc import Callable

from rltrain.liveness.ending import FAILED, first_node
from rltrain.system.threads import JobThread

LOOK_S = 1.0


class StoreWatch:
    """A thread that asks nobody. The watchdog, which asks the store all the time, says when it was `answered`.

    Seconds are counted by its own looks, so that a process which was stopped for a while begins where it was. One rank
    of every host prints the message: those of the store's own host have theirs.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        limit: str,
        last_known: Callable[[], str],
        end: Callable[[int], None] = os._exit,
        look_s: float = LOOK_S,
    ) -> None:
        """`limit`: what sets it, such as a config key. `last_known`: what this rank is doing, in words."""
        self._rank, self._limit_s, self._limit, self._last_known, self._end = rank, limit_s, limit, last_known, end
        self._look_s = look_s
        self._silent_s = 0.0
        self._over = threading.Event()
        self._thread = JobThread(target=self._run, daemon=True, name="store watch")

    def start(self) -> None:
        self._thread.start()

    def answered(self) -> None:
        """The store has just answered."""
        self._silent_s = 0.0

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._look_s):
            self._silent_s += self._look_s
            if self._silent_s > self._limit_s:
                self._end_without_store()
                return

    def _end_without_store(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"\nrltrain: rank {self._rank} on {platform.node()} {self._last_known()}: the job's store on "
                f"{first_node()} has not answered for {self._limit} = "
                f"{self._limit_s:g} s, so this host is cut off from the first one, or torchrun hangs there",
                file=sys.stderr,
                flush=True,
            )
        self._end(FAILED)
