"""How much of its time a role worked, and how fast its models computed meanwhile."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass


@dataclass
class Work:
    """Seconds of tasks, of those tasks that computed with a model, and the operations and tokens of these."""

    seconds: float = 0.0
    computing_s: float = 0.0
    operations: float = 0.0
    tokens: float = 0.0


class RoleWork:
    """Of the roles of one rank, between two reports. `peak` is what the device can do, in operations per second."""

    def __init__(self, peak: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._peak, self._clock = peak, clock
        self._since = clock()
        self._work: dict[str, Work] = {}

    def add(self, roles: Collection[str], seconds: float, operations: float = 0.0, tokens: float = 0.0) -> None:
        """A task of `roles` is over; of a model on several ranks this one's share counts."""
        for role in roles:
            work = self._work.setdefault(role, Work())
            work.seconds += seconds
            if operations:
                work.computing_s += seconds
                work.operations += operations
                work.tokens += tokens

    def metrics(self, num_ranks: Mapping[str, int]) -> dict[str, float]:
        """perf/<role>_idle, _tokens_per_gpu_s, _tflops, _mfu and _pflop since the last call, of those roles that have
        ever worked; `num_ranks` has how many ranks each has, which are taken to do as much as this one."""
        now = self._clock()
        elapsed, self._since = now - self._since, now
        metrics: dict[str, float] = {}
        for role, ranks in num_ranks.items():
            if (work := self._work.get(role)) is None:
                continue
            metrics[f"perf/{role}_idle"] = max(0.0, 1 - work.seconds / elapsed)
            if work.operations:
                reached = work.operations / work.computing_s
                metrics[f"perf/{role}_tokens_per_gpu_s"] = work.tokens / work.computing_s
                metrics[f"perf/{role}_tflops"] = reached / 1e12
                metrics[f"perf/{role}_pflop"] = work.operations * ranks / 1e15
                if self._peak is not None:
                    metrics[f"perf/{role}_mfu"] = reached / self._peak
            self._work[role] = Work()
        return metrics


def of_whole_job(step: Mapping[str, float], num_ranks: int, peak: float | None) -> dict[str, float]:
    """What all roles together computed in a step, per second of it and rank of the job, from the merged metrics of the
    step: nothing where these have no role that computed, or no seconds."""
    pflop = [value for name, value in step.items() if name.startswith("perf/") and name.endswith("_pflop")]
    if not pflop or "perf/step_time_s" not in step:
        return {}
    reached = sum(pflop) * 1e15 / step["perf/step_time_s"] / num_ranks
    return {"perf/tflops_per_gpu": reached / 1e12} | ({} if peak is None else {"perf/mfu": reached / peak})
