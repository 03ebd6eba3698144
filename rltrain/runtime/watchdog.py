"""Ends a job in which nobody gets on, or a rank or the store is lost; joins within a limit."""

import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.errors import FAILED, USER_ERROR, StallError
from rltrain.runtime.ending import MESSAGE_GRACE_S, Ending, end_alone, first_line, first_node, wait_briefly
from rltrain.runtime.heartbeat import INTERVAL_S, Board, Heartbeat, describe_threads
from rltrain.runtime.job_store import Observer, OwnBeats, is_silent, what_it_does
from rltrain.runtime.machine import JobThread, has_lost_launcher
from rltrain.runtime.world import World, join_world

# Ends a rank that the job's store answers no more, as behind a cable that was cut: no call of it would ever return.

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


# Ends a job in which nobody gets on any more, or a rank is lost, with one message, and every rank's Python stacks in
# the run folder.

logger = logging.getLogger(__name__)

STALL = "stall"
RANKS_AT_ONCE = 64
"""As many look at rank 0 every time; the next as many every other time, and so on: whoever would judge soon looks
often. As many are looked at together where it does not run."""


class Watchdog:
    """A thread per rank. It also sees ranks that hang inside a collective or a kernel, which have no limit of ours.

    The lowest rank that runs reads all heartbeats and judges; the others look for its verdict only. After a verdict
    every rank writes its stacks to <output_dir>/stalls/rank<r>.txt, one prints the message, and all end. As they do
    where another rank fails, or the torchrun agent that started one was killed.

    A task that gets on silently, as a first compilation does, looks like one that hangs: the limit, or the task's own
    in `timeouts.tasks`, must exceed its longest silent piece.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        observer: Observer,
        store: dist.Store,
        output_dir: Path,
        interval_s: float = INTERVAL_S,
        beats: OwnBeats | None = None,
    ) -> None:
        """`store` is for the thread's calls: World.background. `beats`, of JobStore, knows whether the job ends."""
        self.heartbeat = heartbeat
        self.rank = heartbeat.rank
        self.store = store
        self.beats = beats or OwnBeats(store)
        self.ending = Ending(store, self.rank, len(observer.ranks), self.doing)
        self.observer = Observer(Board(self.store), len(observer.ranks), observer.limits)
        self.folder = output_dir / "stalls"
        self.interval_s = interval_s
        self._num_looks = 0
        self.store_watch = StoreWatch(self.rank, *_of_store(observer.limits), self.doing)
        self._ended = threading.Event()
        self._thread = JobThread(target=self._run, daemon=True, name="watchdog")

    def doing(self) -> str:
        """What this rank does, in words."""
        return what_it_does(self.heartbeat.now())

    def start(self) -> None:
        """Watch from now on. The heartbeat must have been started."""
        self.store_watch.start()
        self._thread.start()

    def stop(self) -> None:
        """This rank has done its part and will not be needed any more: to be called before the process ends."""
        self._ended.set()
        self._thread.join()
        self.store_watch.stop()

    def _run(self) -> None:
        while not self.beats.wait(self._ended, self.interval_s):
            self._look()
            self.store_watch.answered()

    def _look(self) -> None:
        if self.beats.job_ends():
            if self.store.check([STALL]):
                self._end(json.loads(self.store.get(STALL)))
            elif self.ending.has_begun:
                self.ending.follow()
        elif has_lost_launcher():
            self._end_without_launcher()
        elif self._judges() and (verdict := self.observer.verdict()):
            self.ending.come_near()
            self._end(json.loads(self.store.compare_set(STALL, "", json.dumps(str(verdict)))))

    def _judges(self) -> bool:
        """Whether no lower rank runs. Of those the lowest are looked at, and the next where none of these does."""
        if self.rank == 0:
            return True
        self._num_looks += 1
        if self._num_looks % (1 + self.rank // RANKS_AT_ONCE):
            return False
        lower = (range(first, min(first + RANKS_AT_ONCE, self.rank)) for first in range(0, self.rank, RANKS_AT_ONCE))
        return not self._running([0]) and not any(map(self._running, lower))

    def _end(self, verdict: str) -> None:
        self._write_stacks(verdict)
        self.store.set(f"{STALL}/written/{self.rank}", "1")
        stacks = f"What every rank was doing, with Python stacks: {self.folder}/rank*.txt"
        message = f"{verdict}{self.ending.told_way_on()}. {stacks}"
        self.ending.with_message(message, USER_ERROR, before_printing=self._wait_for_stacks)

    def _end_without_launcher(self) -> None:
        """Nobody would start this rank anew, and the other nodes' agents would wait for its own at the end."""
        self.ending.with_message(
            f"rank {self.rank} on {platform.node()} {self.doing()}: torchrun, which started it, "
            f"was killed on that host{self.ending.told_way_on()}",
            FAILED,
        )

    def _write_stacks(self, verdict: str) -> None:
        text = f"{verdict}\n\nrank {self.rank} {self.doing()}\n\n{describe_threads()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank{self.rank}.txt").write_text(text)
        except OSError as error:
            # The message must be printed all the same: a full or hung file system may be why the job stalls.
            logger.error("cannot write to %s: %s", self.folder, error)

    def _wait_for_stacks(self) -> None:
        others = self._running(self.observer.ranks)
        wait_briefly(self.store, [f"{STALL}/written/{rank}" for rank in others], MESSAGE_GRACE_S)

    def _running(self, ranks: Collection[int]) -> list[int]:
        limits = self.observer.limits
        statuses = self.observer.look(ranks).items()
        return [rank for rank, seen in statuses if not seen.beat.finished and not is_silent(seen, limits)]


def _of_store(limits: Timeouts) -> tuple[float, str]:
    """How long it may be silent, which is as long as a rank may be, and what says so."""
    return min((getattr(limits, name), f"timeouts.{name}") for name in ("lost_s", "no_progress_s"))


# Joining the job: the first thing that a rank does, which ends within a limit or with a message.


def join_within(timeout_s: float) -> World:
    """The world, once all ranks have come. Where some do not within `timeout_s`, or the store does not answer within
    twice that, the process ends. Collective over: all ranks."""
    rank = int(os.environ["RANK"])
    watch = StoreWatch(rank, 2 * timeout_s, "twice the limit of the start", lambda: "is at joining the job")
    watch.start()
    try:
        return join_world(timeout_s)
    except (StallError, dist.DistError) as error:
        end_alone(f"rank {rank} on {platform.node()} is at joining the job, which failed: {first_line(error)}")
    finally:
        watch.stop()
