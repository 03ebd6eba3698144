"""Stops a job on request, and keeps the store until all ranks are done."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from rltrain.errors import FAILED, StallError
from rltrain.runtime.ending import Ending
from rltrain.runtime.heartbeat import Board
from rltrain.runtime.job_store import JobStore, Observer, poll_s
from rltrain.runtime.machine import JobThread
from rltrain.runtime.world import World

logger = logging.getLogger(__name__)

# Stopping on request: SIGTERM and SIGUSR1 from a scheduler that needs the machines, or Ctrl-C.

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ASKED_AGAIN = {signal.SIGINT, signal.SIGTERM}
"""Signals after a second Ctrl-C. The first one sends a rank SIGINT twice, from the terminal and from torchrun. At the
second one torchrun sends SIGTERM."""

PAUSE = "paused: "
"""Beginning of the reasons for a stop without a signal."""

NONE_SAVED = "checkpoint.save_interval and checkpoint.save_every_s are 0"

LOOK_S = 0.5
SAVES_KEPT = 8
"""Number of saves by time that the store remembers. A rank further behind has waited for complete checkpoints."""


class Decided(NamedTuple):
    """The decisions of all ranks so far: the last boundary in question, the latest boundaries with a save by time, and
    the reason to end at the last boundary. An empty reason means that the job continues."""

    boundary: int = -1
    saves: tuple[int, ...] = ()
    reason: str = ""

    @classmethod
    def read(cls, text: str) -> "Decided":
        boundary, _, rest = text.partition(" ")
        saves, _, reason = rest.partition(" ")
        return cls(int(boundary or -1), tuple(map(int, filter(None, saves.split(",")))), reason)

    def __str__(self) -> str:
        return f"{self.boundary} {','.join(map(str, self.saves))} {self.reason}"


class StopRequest:
    """A request by signal to stop the job, received by any rank.

    The signal is only recorded. Ranks stop together at a boundary between steps. The first rank there decides for all.
    If this takes longer than `within_s`, the process ends before the boundary. It ends at once if other ranks are gone.
    Then no step can end any more, and torchrun waits for the remaining ranks.

    A job that saves nothing handles only SIGINT, and ends at once with one line.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        observer: Observer,
        *,
        saves: bool,
        within_s: float,
        last_resort: Callable[[], str],
        looks_at: Collection[int] | None = None,
    ) -> None:
        """`store` is World.background, for calls from a thread. `last_resort` returns what remains of a run without a
        final save. `looks_at` are the ranks to be watched for their end (None: all)."""
        self.ending = Ending(store, rank, len(observer.ranks))
        self._store = dist.PrefixStore("stop", store)
        self._observer = Observer(Board(store), len(observer.ranks), observer.limits)
        self._looks_at = observer.ranks if looks_at is None else looks_at
        self.saves = saves
        self.within_s = within_s
        self._last_resort = last_resort
        self._decided = ""
        """The text of `Decided` last seen by this rank."""
        self._replaced: dict[signal.Signals, Any] = {}
        # Python runs signal handlers on the main thread, but a collective may block it. The number still arrives here.
        self._arrivals, self._arrive = socket.socketpair()
        self.heard = threading.Event()
        """Set if this rank itself has received a signal."""
        self._over = threading.Event()
        self._thread = JobThread(target=self._follow, daemon=True, name="stop request")

    @property
    def _signals(self) -> tuple[signal.Signals, ...]:
        return SIGNALS if self.saves else (signal.SIGINT,)

    def listen(self) -> None:
        """Takes over the signals. Call it from the main thread."""
        self._thread.start()
        self._arrive.setblocking(False)
        signal.set_wakeup_fd(self._arrive.fileno(), warn_on_full_buffer=False)
        self._replaced = {number: signal.signal(number, _leave_to_thread) for number in self._signals}

    def close(self) -> None:
        """Restores the signal handlers. Call it from the main thread. Calling it again does no harm."""
        self._over.set()
        self._arrive.send(b"\0")
        self._thread.join(LOOK_S)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)

    def verdict(self, boundary: int, *, is_time: bool = False) -> str | None:
        """Returns the reason to end the job at `boundary`, or None to continue. The first rank to ask decides for all.

        That rank also decides whether the job saves there because `is_time` is set. `saves_at` returns this decision.
        The store keeps only the last boundary in question.
        """
        found = self._store.get("requested").decode() if self._store.check(["requested"]) else ""
        while True:
            last = Decided.read(self._decided)
            if last.reason or boundary <= last.boundary:
                return last.reason or None if boundary >= last.boundary else None
            saves = (*last.saves, boundary)[-SAVES_KEPT:] if is_time else last.saves
            mine = Decided(boundary, saves, found)
            self._decided = self._store.compare_set("decided", self._decided, str(mine)).decode()

    def saves_at(self, boundary: int) -> bool:
        """Returns whether all ranks save at `boundary` because it was time. Call `verdict` for the boundary first."""
        return boundary in Decided.read(self._decided).saves

    def saved_by_time(self) -> tuple[int, ...]:
        """Returns the latest boundaries with a save by time, even if this rank has not reached them."""
        if self._store.check(["decided"]):
            return Decided.read(self._store.get("decided").decode()).saves
        return ()

    def pause(self, reason: str) -> None:
        """Makes all ranks save and end at the next boundary that none of them has reached. Any number of ranks may call
        it."""
        self._store.compare_set("requested", "", PAUSE + reason)

    def _follow(self) -> None:
        while (requested := self._next_signal(None)) is None:
            if self._over.is_set():
                return
        self.heard.set()
        deadline = time.monotonic() + self.within_s
        self._end_if_others_are_gone(requested)
        if not self.saves:
            self._end(requested, f"the job ends and saves nothing, because {NONE_SAVED}")
        self._announce(requested)
        while True:
            also = self._next_signal(LOOK_S)
            if self._over.is_set():
                return
            self._end_if_others_are_gone(requested)
            if {requested, also} == ASKED_AGAIN:
                self._end(requested, "on the second request the job ends at once, without a checkpoint")
            if time.monotonic() > deadline:
                limit = f"checkpoint.stop_within_s = {self.within_s:g} s"
                self._end(requested, f"the step did not end within {limit}, so nothing was saved", FAILED)

    def _end(self, requested: signal.Signals, why: str, status: int | None = None) -> NoReturn:
        left = f"; {self._last_resort()}" if self.saves else ""
        self.ending.with_message(f"{requested.name}: {why}{left}", status or 128 + requested)

    def _next_signal(self, seconds: float | None) -> signal.Signals | None:
        """Returns the next signal. None for other signals, or if none arrives within `seconds`."""
        self._arrivals.settimeout(seconds)
        try:
            number = self._arrivals.recv(1)[0]
        except TimeoutError:
            return None
        return signal.Signals(number) if number in self._signals else None

    def _announce(self, requested: signal.Signals) -> None:
        name = requested.name
        if self._store.compare_set("requested", "", name).decode() == name and self._store.add("announced", 1) == 1:
            sooner = "; Ctrl-C once more ends it at once" if requested == signal.SIGINT else ""
            logger.warning(
                "%s: the job saves at the end of its step and ends, within %g s%s", name, self.within_s, sooner
            )

    def _end_if_others_are_gone(self, requested: signal.Signals) -> None:
        try:
            if self.ending.has_begun:
                self.ending.follow()
            gone = bool(self._observer.gone(self._looks_at))
        except dist.DistNetworkError as error:
            logger.debug("stop request: the store is gone: %s", error)
            gone = True
        if gone:
            os._exit(128 + requested)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing, because the thread of the stop request has already received the number."""


# The end of finished ranks. A rank that others still need stays.

LEFT = "left"
"""Counter in the store of the ranks that no longer need it."""
LEAVING_LOOK_S = 0.1
LEAVES_WITHIN_S = 30.0
"""Seconds for the other ranks to leave after all of them are done."""
NOTICED_WITHIN_S = 5.0
"""Seconds for torchrun's agents to notice a new node. They check once a second."""


def await_signal_of_launcher(stop: StopRequest, world: World, stopped_by: str | None) -> None:
    """Waits a few seconds for SIGTERM on this rank, if SIGTERM has stopped a job over several nodes.

    Each torchrun agent notices a new node by itself and then sends SIGTERM to its own ranks. If the ranks of an agent
    have ended well before, it regards the job as done and closes it to the other agents.
    """
    if world.num_nodes > 1 and stopped_by == "SIGTERM":
        stop.heard.wait(NOTICED_WITHIN_S)


def leave_store(job_store: JobStore, ending: Ending) -> None:
    """Makes this rank's last call to the store. Collective over: all ranks.

    If rank 0 has the store, it returns after all other ranks. If the job fails or ranks are lost, it ends with the job.
    """
    world, store = job_store.world, job_store.world.background
    if not world.has_store_in_rank_0:
        return
    if world.rank:
        store.add(LEFT, 1)
        return
    others, deadline = range(1, world.size), math.inf
    while (num_left := store.add(LEFT, 0)) < len(others):
        if ending.has_begun:
            ending.follow()
        if gone := job_store.observer.gone(others):
            ending.by(StallError(f"ranks {gone} were lost before their end"))
        if time.monotonic() > deadline:
            logger.warning("%d finished ranks have not left the store", len(others) - num_left)
            return
        statuses = job_store.observer.look(others).values()
        if deadline == math.inf and all(status.beat.finished for status in statuses):
            deadline = time.monotonic() + LEAVES_WITHIN_S
        time.sleep(max(LEAVING_LOOK_S, poll_s(world.size)))
