"""Stopping a job that is asked to end, and leaving the store when ranks are done."""

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

# Stopping a job that is asked to end: by SIGTERM and SIGUSR1 from a scheduler that takes the machines, by Ctrl-C.

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ASKED_AGAIN = {signal.SIGINT, signal.SIGTERM}
"""A second Ctrl-C, whatever torchrun does: at the first one a rank gets SIGINT twice, from the terminal and from
torchrun, which at the second one sends SIGTERM."""

PAUSE = "paused: "
"""What reasons begin with that a rank has to stop at, without a signal."""

NONE_SAVED = "checkpoint.save_interval and checkpoint.save_every_s are 0"

LOOK_S = 0.5
SAVES_KEPT = 8
"""Boundaries at which the job saved by time that the store remembers. A rank that is further behind has waited for
checkpoints to be complete."""


class Decided(NamedTuple):
    """What ranks have decided: the last boundary that any of them has asked about, the latest boundaries at which the
    job saves by time, and why it ends at the last one. The reason is empty where the job goes on."""

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
    """Whether any rank of the job has got a signal that asks it to stop.

    The signal is only noted. Ranks stop together, at a boundary between steps: the first one to come to it decides for
    all. If that takes longer than `within_s`, the process ends without it, and at once where other ranks are gone: no
    step will end then, and torchrun, which has sent the signal because of that, waits for those that are left.

    In a job that saves nothing only SIGINT is listened to, and ends it at once with one line.
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
        """`store` is for a thread's calls: World.background. `last_resort` says what is left if the job ends without
        saving. `looks_at` are the ranks of which it finds out whether they are gone (None: all)."""
        self.ending = Ending(store, rank, len(observer.ranks))
        self._store = dist.PrefixStore("stop", store)
        self._observer = Observer(Board(store), len(observer.ranks), observer.limits)
        self._looks_at = observer.ranks if looks_at is None else looks_at
        self.saves = saves
        self.within_s = within_s
        self._last_resort = last_resort
        self._decided = ""
        """The text of `Decided`, as this rank has seen it last."""
        self._replaced: dict[signal.Signals, Any] = {}
        # Python runs handlers on the main thread, which a collective may hold; the number arrives here all the same.
        self._arrivals, self._arrive = socket.socketpair()
        self.heard = threading.Event()
        """This rank has got a signal itself."""
        self._over = threading.Event()
        self._thread = JobThread(target=self._follow, daemon=True, name="stop request")

    @property
    def _signals(self) -> tuple[signal.Signals, ...]:
        return SIGNALS if self.saves else (signal.SIGINT,)

    def listen(self) -> None:
        """Take the signals over from now on. From the main thread."""
        self._thread.start()
        self._arrive.setblocking(False)
        signal.set_wakeup_fd(self._arrive.fileno(), warn_on_full_buffer=False)
        self._replaced = {number: signal.signal(number, _leave_to_thread) for number in self._signals}

    def close(self) -> None:
        """Nothing has to be stopped any more. From the main thread; may be repeated."""
        self._over.set()
        self._arrive.send(b"\0")
        self._thread.join(LOOK_S)
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)

    def verdict(self, boundary: int, *, is_time: bool = False) -> str | None:
        """Why the job ends at `boundary`, or None where it goes on: what the first rank to ask found, for all ranks.

        That rank also decides whether the job saves there because it `is_time`, which `saves_at` tells. What is kept is
        the last boundary that a rank has asked about, not each of them.
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
        """Whether all ranks save at `boundary` because it was time. For a rank that has asked for its verdict."""
        return boundary in Decided.read(self._decided).saves

    def saved_by_time(self) -> tuple[int, ...]:
        """Returns the latest boundaries at which the job saves by time, whether or not this rank has come to them."""
        if self._store.check(["decided"]):
            return Decided.read(self._store.get("decided").decode()).saves
        return ()

    def pause(self, reason: str) -> None:
        """Have all ranks save and end at the next boundary that none of them has come to. By any rank, and by as many
        as find the reason."""
        self._store.compare_set("requested", "", PAUSE + reason)

    def _follow(self) -> None:
        while (requested := self._next_signal(None)) is None:
            if self._over.is_set():
                return
        self.heard.set()
        deadline = time.monotonic() + self.within_s
        self._end_if_others_are_gone(requested)
        if not self.saves:
            self._end(requested, f"the job ends and saves nothing, as {NONE_SAVED}")
        self._announce(requested)
        while True:
            also = self._next_signal(LOOK_S)
            if self._over.is_set():
                return
            self._end_if_others_are_gone(requested)
            if {requested, also} == ASKED_AGAIN:
                self._end(requested, "asked again, the job ends at once without a checkpoint")
            if time.monotonic() > deadline:
                limit = f"checkpoint.stop_within_s = {self.within_s:g} s"
                self._end(requested, f"the step did not end within {limit}, so nothing was saved", FAILED)

    def _end(self, requested: signal.Signals, why: str, status: int | None = None) -> NoReturn:
        left = f"; {self._last_resort()}" if self.saves else ""
        self.ending.with_message(f"{requested.name}: {why}{left}", status or 128 + requested)

    def _next_signal(self, seconds: float | None) -> signal.Signals | None:
        """The next one that has come; None for one that is not for it, or where none comes within `seconds`."""
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
    """The thread that follows the signals has got the number already."""


# The end of ranks that have done their part: whoever others still need stays.

LEFT = "left"
"""Counts, in the store, the ranks that need it no more."""
LEAVING_LOOK_S = 0.1
LEAVES_WITHIN_S = 30.0
"""From where all ranks have done their part."""
NOTICED_WITHIN_S = 5.0
"""A torchrun agent looks once a second whether nodes have come."""


def await_signal_of_launcher(stop: StopRequest, world: World, stopped_by: str | None) -> None:
    """Where SIGTERM has stopped a job over several nodes: return once this rank has got it too, or seconds later.

    Agents of torchrun notice by themselves that a node has come, and then send SIGTERM to their own ranks. One whose
    ranks have ended well before takes the job for done, and closes it to the others.
    """
    if world.num_nodes > 1 and stopped_by == "SIGTERM":
        stop.heard.wait(NOTICED_WITHIN_S)


def leave_store(job_store: JobStore, ending: Ending) -> None:
    """The last call of a rank to the store. Rank 0, where it has the store itself, returns after all others, or ends
    with them where the job fails: also where they are lost. Collective over: all ranks."""
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
            logger.warning("%d ranks that are done have not left", len(others) - num_left)
            return
        statuses = job_store.observer.look(others).values()
        if deadline == math.inf and all(status.beat.finished for status in statuses):
            deadline = time.monotonic() + LEAVES_WITHIN_S
        time.sleep(max(LEAVING_LOOK_S, poll_s(world.size)))
