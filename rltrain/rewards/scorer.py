"""Scores samples with a reward function whose failures cost a sample and never the run."""

import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from rltrain.config import schema
from rltrain.rewards.answers import Answer
from rltrain.rewards.calling import call
from rltrain.rewards.registry import RewardFunction
from rltrain.rewards.scorable import Scorable
from rltrain.rewards.worker_process import Longest, Request, Silence, WorkerProcess

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 10
MAX_METRICS = 50
"""Names that a function may give to numbers; those of more are not kept."""


@dataclass(frozen=True)
class Scores:
    """The reward of each sample; those that the function failed on have reward 0 and are counted."""

    rewards: list[float]
    num_errors: int
    """It raised, returned no finite number, or ended its process."""
    num_timeouts: int
    first_failure: str | None = field(default=None, compare=False)
    """On which response, and why, with the traceback where there is one."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns the function rewarded one by one. Their sum is the sample's reward."""
    skipped: frozenset[int] = frozenset()
    """Samples that the function is not for, also with reward 0."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum over samples, and number of samples, of what else the function said in numbers."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "skipped": sorted(self.skipped), "turn_rewards": [*self.turn_rewards.items()]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Scores":
        metrics = {name: (total, count) for name, (total, count) in record["metrics"].items()}
        sets = {"skipped": frozenset(record["skipped"]), "turn_rewards": dict(record["turn_rewards"])}
        return cls(**{**record, **sets, "metrics": metrics})


class PendingScores:
    """Scores that workers have begun to make, in `futures`; `made` makes them of what came of these, and raises what
    the scorer raises."""

    def __init__(self, made: Callable[[], Scores], futures: Sequence[Future[list[Answer]]] = ()) -> None:
        self._made, self._futures = made, futures

    @property
    def is_done(self) -> bool:
        """Whether they are there, or never will be."""
        return all(future.done() for future in self._futures)

    def wait(self) -> Scores:
        return self._made()


class Scorer:
    """Runs one reward function: a trusted one here, any other in worker processes, so that even a hang in C code ends.

    A worker is started at its first sample, killed at a sample that takes longer than `timeout_s`, and ends with this
    process. What a new worker has to import is not on a sample's time, see WorkerProcess. A batch has that time for
    each of its samples. A worker awaits `calls_in_flight` calls of an asynchronous function at a time; a remote judge
    has one worker, and `num_workers` calls in flight. `on_scored` is called after every sample, batch, or calls in
    flight, from any thread: other ranks wait for the result, and see that it gets on. One thread at a time uses a
    scorer. Close it at the end.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        num_workers: int = 2,
        on_scored: Callable[[], None] = lambda: None,
        *,
        calls_in_flight: int = 1,
        retries: int = 0,
    ) -> None:
        self.function = function
        self.limit_s = function.limit_s(timeout_s)
        self.on_scored = on_scored
        if function.remote:
            num_workers, calls_in_flight = 1, num_workers
        self.calls_in_flight = calls_in_flight if function.asynchronous else 1
        start = {
            "function": function.name,
            "options": dict(function.options),
            "score_key": function.named_score,
            "timeout_s": timeout_s,
            "retries": retries,
        }
        longest, self._silence = Longest(), Silence(function)
        self._workers = [WorkerProcess(function, start, longest, self._silence) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # Linux ends a worker with the thread that started it, so these threads live as long as the scorer.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._num_failures = 0
        self._pending = PendingScores(lambda: self._scores((), ()))
        """What was begun last."""

    @classmethod
    def of(cls, function: RewardFunction, settings: schema.Reward, on_scored: Callable[[], None]) -> "Scorer":
        return cls(
            function,
            settings.timeout_s,
            settings.num_workers,
            on_scored,
            calls_in_flight=settings.calls_in_flight,
            retries=settings.retries,
        )

    def score(self, samples: Sequence[Scorable]) -> Scores:
        """Rewards in the order of `samples`. Raises ConfigError if a worker cannot start."""
        return self.begin(samples).wait()

    def begin(self, samples: Sequence[Scorable]) -> PendingScores:
        """Have workers begin with `samples`, for what `score` gives."""
        if self.function.trusted:
            answers = [call(self.function, [sample])[0] for sample in samples]
            return PendingScores(lambda: self._scores(samples, answers))
        if self._pending.is_done:
            self._silence.end()
        futures = [self._threads.submit(self._ask, request) for request in self._requests(samples)]
        self._pending = PendingScores(lambda: self._scores(samples, self._gathered(futures)), futures)
        return self._pending

    def close(self) -> None:
        """End the workers. Nothing can be scored afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, samples: Sequence[Scorable]) -> list[Request]:
        """Samples that stand together in a batch or are awaited together are spread evenly over the workers."""
        if self.function.convention.batched:
            calls = [list(group) for _, group in groupby(samples, key=attrgetter("group"))]
        else:
            calls = [[sample] for sample in samples]
        share = min(self.calls_in_flight, -(-len(calls) // len(self._workers)))
        return [
            Request(self.function, calls[start : start + share], self.limit_s)
            for start in range(0, len(calls), max(share, 1))
        ]

    def _gathered(self, replies: Sequence[Future[list[Answer]]]) -> list[Answer]:
        try:
            return [answer for reply in replies for answer in reply.result()]
        except BaseException:
            self.close()
            raise

    def _ask(self, request: Request) -> list[Answer]:
        worker = self._idle.get()
        try:
            return [answer for answers in self._answers(worker, request) for answer in answers]
        finally:
            self._idle.put(worker)

    def _answers(self, worker: WorkerProcess, request: Request) -> list[list[Answer]]:
        """By call. Where one of several took its process along, or held it up, each is asked for again alone."""
        reply = worker.ask(request)
        self.on_scored()
        if "answers" not in reply and len(request.calls) > 1:
            return [answers for alone in request.alone for answers in self._answers(worker, alone)]
        return request.answers(reply)

    def _scores(self, samples: Sequence[Scorable], answers: Sequence[Answer]) -> Scores:
        failures = [
            (sample, answer)
            for sample, answer in zip(samples, answers, strict=True)
            if "error" in answer or "timeout" in answer
        ]
        for sample, answer in failures:
            self._log_failure(sample, answer)
        return Scores(
            rewards=[answer.get("value", 0.0) for answer in answers],
            num_errors=sum("error" in answer for answer in answers),
            num_timeouts=sum("timeout" in answer for answer in answers),
            first_failure=_described(*failures[0]) if failures else None,
            turn_rewards={index: answer["turns"] for index, answer in enumerate(answers) if "turns" in answer},
            skipped=frozenset(index for index, answer in enumerate(answers) if "skipped" in answer),
            metrics=_summed(answer["metrics"] for answer in answers if "metrics" in answer),
        )

    def _log_failure(self, sample: Scorable, answer: Answer) -> None:
        self._num_failures += 1
        if self._num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self._num_failures == MAX_LOGGED_FAILURES else ""
            reason = answer.get("error") or answer["timeout"]
            logger.warning("reward %s on response %.80r: %s%s", self.function.name, sample.response, reason, last)


def _described(sample: Scorable, answer: Answer) -> str:
    reason = answer.get("traceback") or answer.get("error") or answer["timeout"]
    return f"on the response {sample.response!r:.200}:\n{reason}"


def _summed(metrics: Iterator[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for of_sample in metrics:
        for name, value in of_sample.items():
            if name in sums or len(sums) < MAX_METRICS:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)
    return sums
