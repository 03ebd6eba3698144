"""Brings every role's metrics of a step together on one rank, with how much each role worked."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from rltrain.observability.names import times_a_task
from rltrain.runtime.job_store import JobStore

# Brings every role's metrics of a step together on one rank, without holding up the run.

Metrics = dict[str, float]

STEPS_KEPT = 64


class Sink(Protocol):
    """Where the merged metrics of a step go, step by step; but for late ones, of a step that has been written."""

    def write(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """`expected(step)` tells how many tasks of each of the reporting `ranks` add metrics of a step.

    A rank publishes a step once its last task of that step has added its metrics, with those of `at_publish`. The
    logging rank passes a step to the sinks once all its ranks have published, and looks for that whenever it adds
    something itself, with what `of_whole_step` makes of all ranks' metrics. Ranks report of at most `steps_ahead` steps
    behind the one that is trained on. For ranks of `late` no step waits: where they come later than the others, what
    they have to say of it is passed on by itself.
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
        """The last ones, among them all that may be of steps whose training this rank has yet to do."""
        self.num_added: Counter[int] = Counter()
        self.late = frozenset(late)
        self.outstanding: deque[tuple[int, str]] = deque()
        """On the logging rank: (step, key) of what late ranks have yet to say of steps that were passed on."""
        self.uncollected = steps if self.rank == logging_rank else steps[:0]
        self.previous_step_end = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        """Metrics of one task of this rank. Seconds of a task that comes several times in the step add up."""
        pending = self.pending.setdefault(step, {})
        seconds = {name for name in pending.keys() & metrics.keys() if times_a_task(name)}
        pending.update({name: value + pending[name] if name in seconds else value for name, value in metrics.items()})
        self.num_added[step] += 1
        if self.num_added[step] == self.expected(step)[self.rank]:
            self._publish(step)
        self.collect()

    def collect(self) -> None:
        """On the logging rank: pass on the steps that are complete."""
        self._collect(complete_only=True)

    def unfinished(self, step: int) -> dict[int, Metrics]:
        """What this rank has reported of `step` and later ones, by step."""
        return {number: metrics for number, metrics in (*self.pending.items(), *self.published) if number >= step}

    def adopt(self, metrics: Mapping[int, Metrics]) -> None:
        """On the logging rank: what was reported of these steps before the run was interrupted."""
        for step, values in metrics.items():
            self.pending.setdefault(step, {}).update(values)

    def close(self) -> None:
        """Publish what is left, and on the logging rank wait for the others and pass on the remaining steps."""
        for step in sorted(self.pending):
            self._publish(step)
        self.job_store.put(f"metrics/closed/{self.rank}", True)
        if self.rank == self.logging_rank:
            for rank in sorted(self.ranks):
                self.job_store.get(f"metrics/closed/{rank}", waiting_for=f"the last metrics of rank {rank}")
            self._collect(complete_only=False)
        self.abandon()

    def await_end(self, rank: int | None = None) -> None:
        """Wait until `rank` closes, None being the logging rank: for those whom nobody waits for. Were they to end
        before the others, their launcher would leave these once all of a machine's ranks had."""
        last = self.logging_rank if rank is None else rank
        self.job_store.get(f"metrics/closed/{last}", waiting_for="the end of the run")

    def abandon(self) -> None:
        """Close the sinks without waiting for anybody."""
        for sink in self.sinks:
            sink.close()

    def _publish(self, step: int) -> None:
        metrics = self.pending.pop(step)
        self.num_added.pop(step, None)
        if metrics:  # of a boundary at which nothing was saved there is nothing to tell
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
    """Of a task that several ranks time, such as a checkpoint, the longest counts."""
    longest = {name: max(merged[name], metrics[name]) for name in metrics.keys() & merged.keys() if times_a_task(name)}
    merged |= metrics | longest


# How much of its time a role worked, and how fast its models computed meanwhile.


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
