"""Ends a job in which nobody gets on any more, with one message and every rank's Python stacks in the run folder."""

import json
import logging
import threading
from pathlib import Path

import torch.distributed as dist

from rltrain.cluster.ending import MESSAGE_GRACE_S, end_process, wait_briefly
from rltrain.cluster.heartbeat import INTERVAL_S, Board, Heartbeat
from rltrain.cluster.judgement import SILENT_S, Standing, what_it_does
from rltrain.cluster.observer import Observer
from rltrain.cluster.stacks import describe_threads

logger = logging.getLogger(__name__)

STATUS = 2
STALL = "stall"


class Watchdog:
    """A thread per rank. It also sees ranks that hang inside a collective or a kernel, which have no limit of ours.

    The lowest rank that runs reads all heartbeats and judges; the others look for its verdict only. After a verdict
    every rank writes its stacks to <output_dir>/stalls/rank<r>.txt, one prints the message, and all end.

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
    ) -> None:
        """`store` and `observer`'s are only copied: the thread talks over a connection of its own."""
        self.heartbeat = heartbeat
        self.rank = heartbeat.rank
        self.store = store.clone()  # type: ignore[attr-defined]
        self.observer = Observer(Board(self.store), len(observer.ranks), observer.limits, observer.members)
        self.folder = output_dir / "stalls"
        self.interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self) -> None:
        """Watch from now on. The heartbeat must have been started."""
        self._thread.start()

    def stop(self) -> None:
        """This rank has done its part and will not be needed any more: to be called before the process ends."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            try:
                self._look()
            except RuntimeError as error:
                # The store ends with the launcher of the job, which ends this process as well.
                logger.debug("watchdog: the store is gone: %s", error)
                return

    def _look(self) -> None:
        if self.store.check([STALL]):
            self._end(json.loads(self.store.get(STALL)))
        elif self._judges() and (stall := self.observer.find_stall()):
            self._end(json.loads(self.store.compare_set(STALL, "", json.dumps(str(stall)))))

    def _judges(self) -> bool:
        return not any(_runs(self.observer.look([lower])[lower]) for lower in range(self.rank))

    def _end(self, verdict: str) -> None:
        self._write_stacks(verdict)
        self.store.set(f"{STALL}/written/{self.rank}", "1")
        message = f"rltrain: {verdict}. What every rank was doing, with Python stacks: {self.folder}/rank*.txt"
        end_process(self.store, message, STATUS, before_printing=self._wait_for_stacks)

    def _write_stacks(self, verdict: str) -> None:
        text = f"{verdict}\n\nrank {self.rank} {what_it_does(self.heartbeat.now())}\n\n{describe_threads()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank{self.rank}.txt").write_text(text)
        except OSError as error:
            # The message must be printed all the same: a full or hung file system may be why the job stalls.
            logger.error("cannot write to %s: %s", self.folder, error)

    def _wait_for_stacks(self) -> None:
        others = [rank for rank, standing in self.observer.look(self.observer.ranks).items() if _runs(standing)]
        wait_briefly(self.store, [f"{STALL}/written/{rank}" for rank in others], MESSAGE_GRACE_S)


def _runs(standing: Standing) -> bool:
    return not standing.beat.finished and standing.silent_s <= SILENT_S
