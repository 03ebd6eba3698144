"""Waits with a limit and a name: a stall is reported with what the awaited ranks are doing, and ends the job."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from rltrain.cluster.world import Bulletin
from rltrain.errors import StallError

logger = logging.getLogger(__name__)


class Patience:
    """How long to wait for other ranks, and whom to ask when it takes long."""

    def __init__(self, bulletin: Bulletin, stall_report_s: float) -> None:
        self.bulletin = bulletin
        self.stall_report_s = stall_report_s
        self.timeout_s = bulletin.world.timeout_s

    def wait(self, works: Sequence[dist.Work], what: str, ranks: Sequence[int]) -> None:
        """Wait for point-to-point `works` with `ranks`.

        The transport's own time-out would break the process group and name nobody, so a thread waits without one while
        this one reports after `stall_report_s` and raises StallError after `timeout_s`.
        """
        if not works:
            return
        finished = threading.Event()
        failures: list[RuntimeError] = []
        threading.Thread(target=_drain, args=(works, finished, failures), daemon=True, name=f"wait {what}").start()
        self.until(finished.wait, what, ranks)
        if failures:
            raise StallError(f"{self._describe(what, ranks)}: the connection broke: {failures[0]}")

    def until(self, arrived: Callable[[float], bool], what: str, ranks: Sequence[int]) -> None:
        """Call `arrived(seconds)`, which waits that long and says whether it is done, until it is."""
        start = time.monotonic()
        while not arrived(min(self.stall_report_s, self.timeout_s)):
            waited = time.monotonic() - start
            message = f"{self._describe(what, ranks)} for {waited:.0f} s"
            if waited >= self.timeout_s:
                raise StallError(f"{message}; cluster.timeout_s is {self.timeout_s:.0f}")
            logger.warning(message)

    def _describe(self, what: str, ranks: Sequence[int]) -> str:
        activity = "; ".join(f"rank {rank} {self.bulletin.activity(rank)}" for rank in ranks)
        return f"rank {self.bulletin.world.rank} waits at {what}: {activity}"


def _drain(works: Sequence[dist.Work], finished: threading.Event, failures: list[RuntimeError]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        failures.append(error)
    finally:
        finished.set()
