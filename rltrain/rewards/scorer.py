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
from dataclasses import dataclass
from typing import Any

from rltrain.errors import ConfigError
from rltrain.rewards.registry import RewardFunction
from rltrain.rewards.worker import Answer, score_one

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_LOGGED_FAILURES = 10
READ_BYTES = 65536


@dataclass(frozen=True)
class Sample:
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


class Scorer:
    """Runs one reward function: a trusted one here, any other in worker processes, so that even a hang in C code ends.

    A worker is started at its first sample, killed at a sample that takes longer than `timeout_s`, and ends with this
    process. `on_scored` is called after every sample, from any thread: other ranks wait for the result, and see that it
    gets on. `score` is for one thread at a time. Close the scorer at the end.
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
        self._workers = [_Worker(function) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # Linux ends a worker with the thread that started it, so these threads live as long as the scorer.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._num_failures = 0

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Rewards in the order of `samples`. Raises ConfigError if a worker cannot start."""
        try:
            answers = self._answers(samples)
        except BaseException:
            self.close()
            raise
        for sample, answer in zip(samples, answers, strict=True):
            self._log_failure(sample, answer)
        return Scores(
            rewards=[answer.get("value", 0.0) for answer in answers],
            num_errors=sum("error" in answer for answer in answers),
            num_timeouts=sum("timeout" in answer for answer in answers),
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

    def _answers(self, samples: Sequence[Sample]) -> list[Answer]:
        if self.function.trusted:
            return [score_one(self.function, vars(sample)) for sample in samples]
        return list(self._threads.map(self._ask_worker, samples))

    def _ask_worker(self, sample: Sample) -> Answer:
        worker = self._idle.get()
        try:
            return worker.score(sample, self.timeout_s)
        finally:
            self._idle.put(worker)
            self.on_scored()

    def _log_failure(self, sample: Sample, answer: Answer) -> None:
        reason = answer.get("error") or answer.get("timeout")
        if reason is None:
            return
        self._num_failures += 1
        if self._num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self._num_failures == MAX_LOGGED_FAILURES else ""
            logger.warning("reward %s on response %.80r: %s%s", self.function.name, sample.response, reason, last)


class _Worker:
    """One worker process, started when it is first needed and again after it ended, and the pipes to it."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.process: subprocess.Popen[bytes] | None = None

    def score(self, sample: Sample, timeout_s: float) -> Answer:
        """{"value": float}, {"error": text} or {"timeout": text}."""
        process = self.process if self.process is not None and self.process.poll() is None else self._start()
        try:
            return _ask(process, vars(sample), timeout_s)
        except TimeoutError:
            self.kill()
            return {"timeout": f"took longer than reward.timeout_s = {timeout_s:g}"}
        except (EOFError, OSError):
            self.kill()
            return {"error": "ended its process"}

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
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
        return process


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
