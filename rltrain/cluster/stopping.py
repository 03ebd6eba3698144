"""Stopping a job that is asked to end: SIGTERM and SIGUSR1, as schedulers send them before they take the machines."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from rltrain.cluster.ending import end_process
from rltrain.cluster.heartbeat import Board
from rltrain.cluster.observer import Observer
from rltrain.cluster.processes import has_ended

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 1
LOOK_S = 0.5
LOST_S = 10.0
"""A rank of another machine without a heartbeat for this long is gone."""


class StopRequest:
    """Whether any rank of the job has got a signal that asks it to stop.

    The signal is only noted. Ranks stop together, at a boundary between steps: the first one to come to it decides for
    all. If that takes longer than `within_s`, the process ends without it, and at once where other ranks are gone: no
    step will end then, and torchrun, which has sent the signal because of that, waits for those that are left.
    """

    def __init__(
        self, store: dist.Store, observer: Observer, *, within_s: float, last_resort: Callable[[], str]
    ) -> None:
        """`store` and `observer`'s are only copied. `last_resort` says what is left if the job ends without saving."""
        self._store = dist.PrefixStore("stop", store.clone())  # type: ignore[attr-defined]
        self._job_store = store.clone()  # type: ignore[attr-defined]
        self._observer = Observer(Board(self._job_store), len(observer.ranks), observer.limits, observer.members)
        self.within_s = within_s
        self._last_resort = last_resort
        self._replaced: dict[signal.Signals, Any] = {}
        # Python runs handlers on the main thread, which a collective may hold; the number arrives here all the same.
        self._arrivals, self._arrive = socket.socketpair()
        self._over = threading.Event()

    def listen(self) -> None:
        """Take the signals over from now on. From the main thread."""
        threading.Thread(target=self._follow, daemon=True, name="stop request").start()
        self._arrive.setblocking(False)
        signal.set_wakeup_fd(self._arrive.fileno(), warn_on_full_buffer=False)
        self._replaced = {number: signal.signal(number, _leave_to_thread) for number in SIGNALS}

    def close(self) -> None:
        """Nothing has to be stopped any more. From the main thread."""
        self._over.set()
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)

    def verdict(self, boundary: int) -> str | None:
        """Why the job ends at `boundary`, or None where it goes on: what the first rank to ask found, for all ranks."""
        reason = self._store.get("requested").decode() if self._store.check(["requested"]) else ""
        agreed = self._store.compare_set(f"boundary/{boundary}", "", reason or "-").decode()
        return None if agreed == "-" else agreed

    def _follow(self) -> None:
        requested = self._next_signal()
        deadline = time.monotonic() + self.within_s
        if self._others_are_gone():
            os._exit(128 + requested)
        self._announce(requested.name)
        while not self._over.wait(LOOK_S):
            if self._others_are_gone():
                os._exit(128 + requested)
            if time.monotonic() > deadline:
                message = (
                    f"rltrain: {requested.name}: the step did not end within checkpoint.stop_within_s = "
                    f"{self.within_s:g} s, so nothing was saved; {self._last_resort()}"
                )
                end_process(self._job_store, message, STATUS)

    def _next_signal(self) -> signal.Signals:
        while (number := self._arrivals.recv(1)[0]) not in SIGNALS:
            logger.debug("stop request: signal %d is not for it", number)
        return signal.Signals(number)

    def _announce(self, name: str) -> None:
        if self._store.compare_set("requested", "", name).decode() == name and self._store.add("announced", 1) == 1:
            logger.warning("%s: the job saves at the end of its step and ends, within %g s", name, self.within_s)

    def _others_are_gone(self) -> bool:
        try:
            if self._job_store.add("failures", 0) > 0:
                return True
            standings = self._observer.look(self._observer.ranks)
            ended = [rank for rank, standing in standings.items() if has_ended(standing.beat.process)]
            standings |= self._observer.look(ended)  # what they said last: one that has just finished is not lost
            return any(
                (rank in ended or standing.silent_s > LOST_S) and not standing.beat.finished
                for rank, standing in standings.items()
            )
        except RuntimeError as error:
            logger.debug("stop request: the store is gone: %s", error)
            return True


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """The thread that follows the signals has got the number already."""
