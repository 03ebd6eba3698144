"""Scores samples with a reward function whose failures cost a sample and never the run."""

import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rltrain.errors import ConfigError
from rltrain.rewards.registry import RewardFunction
from rltrain.rewards.worker import Answer, score_one

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For a worker to import the function's module, and again for the first call, which imports what it still lacks."""
MAX_LOGGED_FAILURES = 10
READ_BYTES = 65536


@dataclass(frozen=True)
class Scorable:
    """The arguments of a reward function. `response` is text without special tokens."""

    prompt: str
    response: str
    label: str


@dataclass(frozen=True)
class Scores:
    """The reward of each sample; those that the function failed on have reward 0 and are counted."""

    rewards: list[float]
    num_errors: int
    """It raised, returned no finite number, or ended its process."""
    num_timeouts: int
    first_failure: str | None = field(default=None, compare=False)
    """On which response, and why, with the traceback where there is one."""


class Scorer:
    """Runs one reward function: a trusted one here, any other in worker processes, so that even a hang in C code ends.

    A worker is started at its first sample, killed at a sample that takes longer than `timeout_s`, and ends with this
    process. What a new worker has to import is not on a sample's time, see _Worker. `on_scored` is called after every
    sample, from any thread: other ranks wait for the result, and see that it gets on. `score` is for one thread at a
    time. Close the scorer at the end.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        num_workers: int = 2,
        on_scored: Callable[[], None] = lambda: None,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.on_scored = on_scored
        longest = _Longest()
        self._workers = [_Worker(function, timeout_s, longest) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # Linux ends a worker with the thread that started it, so these threads live as long as the scorer.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._num_failures = 0

    def score(self, samples: Sequence[Scorable]) -> Scores:
        """Rewards in the order of `samples`. Raises ConfigError if a worker cannot start."""
        try:
            answers = self._answers(samples)
        except BaseException:
            self.close()
            raise
        failures = [(sample, answer) for sample, answer in zip(samples, answers, strict=True) if "value" not in answer]
        for sample, answer in failures:
            self._log_failure(sample, answer)
        return Scores(
            rewards=[answer.get("value", 0.0) for answer in answers],
            num_errors=sum("error" in answer for answer in answers),
            num_timeouts=sum("timeout" in answer for answer in answers),
            first_failure=_described(*failures[0]) if failures else None,
        )

    def close(self) -> None:
        """End the workers. Nothing can be scored afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, samples: Sequence[Scorable]) -> list[Answer]:
        if self.function.trusted:
            return [score_one(self.function, vars(sample)) for sample in samples]
        return list(self._threads.map(self._ask_worker, samples))

    def _ask_worker(self, sample: Scorable) -> Answer:
        worker = self._idle.get()
        try:
            return worker.score(sample)
        finally:
            self._idle.put(worker)
            self.on_scored()

    def _log_failure(self, sample: Scorable, answer: Answer) -> None:
        self._num_failures += 1
        if self._num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self._num_failures == MAX_LOGGED_FAILURES else ""
            reason = answer.get("error") or answer["timeout"]
            logger.warning("reward %s on response %.80r: %s%s", self.function.name, sample.response, reason, last)


def _described(sample: Scorable, answer: Answer) -> str:
    reason = answer.get("traceback") or answer.get("error") or answer["timeout"]
    return f"on the response {sample.response!r:.200}:\n{reason}"


class _Longest:
    """The sample that took longest of those that got a number, from whichever worker, and its seconds."""

    def __init__(self) -> None:
        self.sample: Scorable | None = None
        self.seconds = -1.0

    def consider(self, sample: Scorable, answer: Answer) -> None:
        if "value" in answer and answer["seconds"] > self.seconds:
            self.sample, self.seconds = sample, answer["seconds"]

    def forget(self, sample: Scorable) -> None:
        if self.sample is sample:
            self.sample, self.seconds = None, -1.0


class _Worker:
    """One worker process, started when it is first needed and again after it ended, and the pipes to it.

    The first call in a process imports what the function's module does not, torch for one. It may take START_TIMEOUT_S,
    and half as long after each in a row that does not return. It is made with the sample that took longest so far: one
    that does return, and has most likely met those imports. As long as there is none it is made with the sample at
    hand, which is asked once more where it took longer than a sample may. So no sample has more or less than its time.
    """

    def __init__(self, function: RewardFunction, timeout_s: float, longest: _Longest) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.longest = longest
        self.num_hung_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def score(self, sample: Scorable) -> Answer:
        """The answer for `sample`, or {"timeout": text}."""
        while not self._is_running():
            self._start()
            first = self.longest.sample or sample
            answer = self._first_call(first)
            if first is sample and answer.get("seconds", 0.0) <= self.timeout_s:
                return answer
        return self._call(sample, self.timeout_s, f"took longer than reward.timeout_s = {self.timeout_s:g}")

    def _first_call(self, sample: Scorable) -> Answer:
        limit_s = max(START_TIMEOUT_S / 2**self.num_hung_starts, self.timeout_s)
        answer = self._call(sample, limit_s, f"took longer than {limit_s:g} s in the first call of its process")
        if "timeout" in answer:
            self.num_hung_starts += 1
        elif "seconds" in answer:
            self.num_hung_starts = 0
        return answer

    def _call(self, sample: Scorable, limit_s: float, otherwise: str) -> Answer:
        """The answer of the process, which is gone where there is none: {"timeout": `otherwise`} or an error."""
        assert self.process is not None
        try:
            answer = _ask(self.process, vars(sample), limit_s)
        except (EOFError, OSError) as error:
            self.kill()
            self.longest.forget(sample)
            return {"timeout": otherwise} if isinstance(error, TimeoutError) else {"error": "ended its process"}
        self.longest.consider(sample, answer)
        return answer

    def _is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()

    def _start(self) -> None:
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", "rltrain.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        try:
            _ask(process, {"function": self.function.name, "options": dict(self.function.options)}, START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            self.kill()
            raise ConfigError(
                f"reward.function: the worker process of {self.function.name!r} did not start "
                f"({type(error).__name__}); its own message is on standard error"
            ) from error


def _ask(process: "subprocess.Popen[bytes]", message: dict[str, Any], timeout_s: float) -> Answer:
    """The worker's answer to one message. Raises TimeoutError, or EOFError / OSError if the process is gone."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    deadline, received = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), READ_BYTES)
            if not chunk:
                raise EOFError
            received += chunk
    answer: Answer = json.loads(received)
    return answer
