"""How much of its time a role worked, and how fast its models computed meanwhile."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass
class Work:
    """Seconds of tasks, of those tasks that computed with a model, and the operations of these."""

    seconds: float = 0.0
    computing_s: float = 0.0
    operations: float = 0.0


class RoleWork:
    """Of the roles of one rank, between two reports. `peak` is what the device can do, in operations per second."""

    def __init__(self, peak: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._peak, self._clock = peak, clock
        self._since = clock()
        self._work: dict[str, Work] = {}

    def add(self, roles: Collection[str], seconds: float, operations: float = 0.0) -> None:
        """A task of `roles` is over."""
        for role in roles:
            work = self._work.setdefault(role, Work())
            work.seconds += seconds
            if operations:
                work.computing_s += seconds
                work.operations += operations

    def metrics(self, roles: Collection[str]) -> dict[str, float]:
        """perf/<role>_idle, _tflops and _mfu since the last call, of those of `roles` that have ever worked."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        metrics: dict[str, float] = {}
        for role in roles:
            if (work := self._work.get(role)) is None:
                continue
            metrics[f"perf/{role}_idle"] = max(0.0, 1 - work.seconds / elapsed)
            if work.operations:
                reached = work.operations / work.computing_s
                metrics[f"perf/{role}_tflops"] = reached / 1e12
                if self._peak is not None:
                    metrics[f"perf/{role}_mfu"] = reached / self._peak
            self._work[role] = Work()
        return metrics
