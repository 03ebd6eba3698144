"""Ends a job without progress, or one that has lost a rank or the store. Joins a job within a limit."""

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

# Ends a rank if the job's store no longer answers, for example after a cut cable. A call to it would never return.

LOOK_S = 1.0


class StoreWatch:
    """A thread that makes no calls to the store. The watchdog calls the store all the time and reports answers by
    `answered`.

    The thread counts seconds by its own checks, so time in which the process was stopped does not count. One rank of
    every host prints the message. On the store's own host, that host's ranks have a message already.
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
        """`limit` names the source of the limit, such as a config key. `last_known` returns this rank's activity in
        words."""
        self._rank, self._limit_s, self._limit, self._last_known, self._end = rank, limit_s, limit, last_known, end
        self._look_s = look_s
        self._silent_s = 0.0
        self._over = threading.Event()
        self._thread = JobThread(target=self._run, daemon=True, name="store watch")

    def start(self) -> None:
        self._thread.start()

    def answered(self) -> None:
        """Reports an answer of the store."""
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


# Ends a job without progress or with a lost rank. One message is printed, and every rank's Python stacks go to the run
# folder.

logger = logging.getLogger(__name__)

STALL = "stall"
RANKS_AT_ONCE = 64
"""Number of ranks that check rank 0 every time. The next ranks check every other time, and so on. Ranks closest to
judging check most often. If rank 0 does not run, this is also the number of ranks checked together."""


class Watchdog:
    """A thread per rank that ends a stalled job. It also finds ranks that hang inside a collective or a kernel.

    The lowest running rank reads all heartbeats and judges. The others only check for its verdict. After a verdict
    every rank writes its stacks to <output_dir>/stalls/rank<r>.txt, one prints the message, and all end. All ranks also
    end if another rank fails, or if the torchrun agent of one was killed.

    A silent task, such as a first compilation, looks like a hanging one. So `timeouts.no_progress_s`, or the task's own
    limit in `timeouts.tasks`, must exceed its longest silent time.
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
        """`store` is World.background, for calls from the thread. `beats` is the one of JobStore."""
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
        """Returns this rank's activity in words."""
        return what_it_does(self.heartbeat.now())

    def start(self) -> None:
        """Starts the thread. The heartbeat must have been started."""
        self.store_watch.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Call it before the process ends, once no rank needs this one any more."""
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
        """Returns whether no lower rank runs. It checks rank 0 first, and then groups of RANKS_AT_ONCE ranks from the
        lowest on."""
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
        stacks = f"Activities and Python stacks of all ranks: {self.folder}/rank*.txt"
        message = f"{verdict}{self.ending.told_way_on()}. {stacks}"
        self.ending.with_message(message, USER_ERROR, before_printing=self._wait_for_stacks)

    def _end_without_launcher(self) -> None:
        """Ends a rank without a torchrun agent. It would not be restarted, and the other nodes' agents would wait for
        its agent."""
        self.ending.with_message(
            f"rank {self.rank} on {platform.node()} {self.doing()}: its torchrun was killed on that host"
            f"{self.ending.told_way_on()}",
            FAILED,
        )

    def _write_stacks(self, verdict: str) -> None:
        text = f"{verdict}\n\nrank {self.rank} {self.doing()}\n\n{describe_threads()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank{self.rank}.txt").write_text(text)
        except OSError as error:
            # The message must still be printed. A full or hung file system may be the cause of the stall.
            logger.error("cannot write to %s: %s", self.folder, error)

    def _wait_for_stacks(self) -> None:
        others = self._running(self.observer.ranks)
        wait_briefly(self.store, [f"{STALL}/written/{rank}" for rank in others], MESSAGE_GRACE_S)

    def _running(self, ranks: Collection[int]) -> list[int]:
        limits = self.observer.limits
        statuses = self.observer.look(ranks).items()
        return [rank for rank, seen in statuses if not seen.beat.finished and not is_silent(seen, limits)]


def _of_store(limits: Timeouts) -> tuple[float, str]:
    """Returns the longest silence of the store in seconds, the same as for a rank, and its config key."""
    return min((getattr(limits, name), f"timeouts.{name}") for name in ("lost_s", "no_progress_s"))


# Joining the job, a rank's first step. It ends within a limit or with a message.


def join_within(timeout_s: float) -> World:
    """Returns the world once all ranks have joined. Collective over: all ranks.

    Ends the process if ranks are missing after `timeout_s`, or if the store does not answer within twice that.
    """
    rank = int(os.environ["RANK"])
    watch = StoreWatch(rank, 2 * timeout_s, "twice the limit of the start", lambda: "is at joining the job")
    watch.start()
    try:
        return join_world(timeout_s)
    except (StallError, dist.DistError) as error:
        end_alone(f"rank {rank} on {platform.node()} could not join the job: {first_line(error)}")
    finally:
        watch.stop()
