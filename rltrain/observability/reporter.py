"""Collects the metrics of all roles on one rank, and measures how much each role worked."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from rltrain.observability.names import times_a_task
from rltrain.runtime.job_store import JobStore

# Collection of all roles' metrics of a step on one rank, without holding up the run.

Metrics = dict[str, float]

STEPS_KEPT = 64


class Sink(Protocol):
    """A destination of merged metrics, step by step. Late metrics of an earlier step may follow."""

    def write(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """The collection of metrics by step. The logging rank passes them to the sinks.

    `expected(step)` returns how many tasks of each reporting rank add metrics of the step. A rank publishes a step once
    its last task of the step has added its metrics, together with those of `at_publish`. Ranks report at most
    `steps_ahead` steps beyond the step in training.

    The logging rank passes a step to the sinks once all `ranks` have published it. It adds the result of
    `of_whole_step` on the merged metrics. It looks for complete steps whenever it adds metrics itself. No step waits
    for ranks of `late`. If their metrics come after the others', they are passed on alone.
    """

    def __init__(
        self,
        job_store: JobStore,
        expected: Callable[[int], Counter[int]],
        steps: range,
        ranks: Collection[int],
        logging_rank: int,
        sinks: Collection[Sink],
        at_publish: Callable[[], Metrics] = dict,
        steps_ahead: int = 0,
        of_whole_step: Callable[[Metrics], Metrics] = lambda merged: {},
        late: Collection[int] = (),
    ) -> None:
        self.job_store = job_store
        self.rank = job_store.world.rank
        self.expected = lru_cache(maxsize=STEPS_KEPT)(expected)
        self.ranks = ranks
        self.logging_rank = logging_rank
        self.sinks = sinks
        self.at_publish = at_publish
        self.of_whole_step = of_whole_step
        self.pending: dict[int, Metrics] = {}
        self.published: deque[tuple[int, Metrics]] = deque(maxlen=steps_ahead + 2)
        """The last published steps. They include all steps that this rank has yet to train on."""
        self.num_added: Counter[int] = Counter()
        self.late = frozenset(late)
        self.outstanding: deque[tuple[int, str]] = deque()
        """On the logging rank: (step, key) of late ranks' missing metrics, for steps already passed on."""
        self.uncollected = steps if self.rank == logging_rank else steps[:0]
        self.previous_step_end = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        """Adds the metrics of one task of this rank. Seconds of a task repeated within the step are summed."""
        pending = self.pending.setdefault(step, {})
        seconds = {name for name in pending.keys() & metrics.keys() if times_a_task(name)}
        pending.update({name: value + pending[name] if name in seconds else value for name, value in metrics.items()})
        self.num_added[step] += 1
        if self.num_added[step] == self.expected(step)[self.rank]:
            self._publish(step)
        self.collect()

    def collect(self) -> None:
        """Passes on the complete steps. Only on the logging rank."""
        self._collect(complete_only=True)

    def unfinished(self, step: int) -> dict[int, Metrics]:
        """Returns this rank's metrics of `step` and later ones, by step."""
        return {number: metrics for number, metrics in (*self.pending.items(), *self.published) if number >= step}

    def adopt(self, metrics: Mapping[int, Metrics]) -> None:
        """Takes the metrics of steps reported before an interruption. Only on the logging rank."""
        for step, values in metrics.items():
            self.pending.setdefault(step, {}).update(values)

    def close(self) -> None:
        """Publishes the remaining metrics. The logging rank also waits for the other ranks and passes on the remaining
        steps."""
        for step in sorted(self.pending):
            self._publish(step)
        self.job_store.put(f"metrics/closed/{self.rank}", True)
        if self.rank == self.logging_rank:
            for rank in sorted(self.ranks):
                self.job_store.get(f"metrics/closed/{rank}", waiting_for=f"the last metrics of rank {rank}")
            self._collect(complete_only=False)
        self.abandon()

    def await_end(self, rank: int | None = None) -> None:
        """Waits until `rank` closes. None means the logging rank.

        For ranks that no other rank waits for. If they ended first, a launcher could stop serving the others once all
        ranks of its machine had ended.
        """
        last = self.logging_rank if rank is None else rank
        self.job_store.get(f"metrics/closed/{last}", waiting_for="the end of the run")

    def abandon(self) -> None:
        """Closes the sinks without waiting for other ranks."""
        for sink in self.sinks:
            sink.close()

    def _publish(self, step: int) -> None:
        metrics = self.pending.pop(step)
        self.num_added.pop(step, None)
        if metrics:  # a boundary without a checkpoint has none
            metrics |= self.at_publish()
        if metrics and self.rank == self.logging_rank:
            now = time.perf_counter()
            metrics["perf/step_time_s"] = now - self.previous_step_end
            self.previous_step_end = now
        self.published.append((step, metrics))
        self.job_store.put(f"metrics/{step}/{self.rank}", metrics)

    def _collect(self, complete_only: bool) -> None:
        while self.uncollected:
            step = self.uncollected[0]
            keys = {rank: f"metrics/{step}/{rank}" for rank in sorted(self.expected(step))}
            present = {rank: key for rank, key in keys.items() if self.job_store.has(key)}
            if complete_only and not keys.keys() - self.late <= present.keys():
                break
            self.uncollected = self.uncollected[1:]
            self.outstanding += [(step, keys[rank]) for rank in keys if rank in self.late and rank not in present]
            merged = self._merged(present.values())
            self._write(step, merged and merged | self.of_whole_step(merged))
        for step, key in [late for late in self.outstanding if self.job_store.has(late[1])]:
            self.outstanding.remove((step, key))
            self._write(step, self._merged([key]))

    def _merged(self, keys: Iterable[str]) -> Metrics:
        merged: Metrics = {}
        for key in keys:
            _merge(merged, self.job_store.get(key, waiting_for=key))
            self.job_store.forget(key)
        return merged

    def _write(self, step: int, metrics: Metrics) -> None:
        for sink in self.sinks if metrics else ():
            sink.write(step, metrics)


def _merge(merged: Metrics, metrics: Metrics) -> None:
    """Merges metrics. If several ranks time a task, such as a checkpoint, the longest time counts."""
    longest = {name: max(merged[name], metrics[name]) for name in metrics.keys() & merged.keys() if times_a_task(name)}
    merged |= metrics | longest


# The share of time that a role worked, and the speed of its models meanwhile.


@dataclass
class Work:
    """The seconds of all tasks, the seconds of tasks that computed with a model, and the operations and tokens of
    these."""

    seconds: float = 0.0
    computing_s: float = 0.0
    operations: float = 0.0
    tokens: float = 0.0


class RoleWork:
    """The work of one rank's roles between two reports. `peak` is the device's peak in operations per second."""

    def __init__(self, peak: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._peak, self._clock = peak, clock
        self._since = clock()
        self._work: dict[str, Work] = {}

    def add(self, roles: Collection[str], seconds: float, operations: float = 0.0, tokens: float = 0.0) -> None:
        """Adds a finished task of `roles`. For a model on several ranks, only this rank's share counts."""
        for role in roles:
            work = self._work.setdefault(role, Work())
            work.seconds += seconds
            if operations:
                work.computing_s += seconds
                work.operations += operations
                work.tokens += tokens

    def metrics(self, num_ranks: Mapping[str, int]) -> dict[str, float]:
        """Returns perf/<role>_idle, _tokens_per_gpu_s, _tflops, _mfu and _pflop since the last call, for roles that
        ever worked.

        `num_ranks` has the number of ranks of each role. The others are assumed to do as much as this one.
        """
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
    """Returns the FLOP/s of all roles together per rank of the job, from the merged metrics of a step.

    Returns {} if no role computed, or if the seconds of the step are missing.
    """
    pflop = [value for name, value in step.items() if name.startswith("perf/") and name.endswith("_pflop")]
    if not pflop or "perf/step_time_s" not in step:
        return {}
    reached = sum(pflop) * 1e15 / step["perf/step_time_s"] / num_ranks
    return {"perf/tflops_per_gpu": reached / 1e12} | ({} if peak is None else {"perf/mfu": reached / peak})
