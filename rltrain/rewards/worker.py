"""The process of an untrusted reward function: `python -m rltrain.rewards.worker`, started by the scorer.

It reads JSON lines from standard input. The first line has the config of the function: {"function", "options",
"score_key", "timeout_s", "retries"}. Its answer reports that the function is ready. Every further line asks for scores:
{"calls", "limit_s"}. A call is a list of samples. A sample is {"prompt", "response", "label"} with the other fields
needed by the function. Calls of an asynchronous function are awaited concurrently.

The answer to such a line is {"answers", "seconds"}: the fields of an Answer per sample, grouped by call, and the time
of all calls. The process ends when its reader is gone.
"""

import asyncio
import json
import logging
import os
import queue
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.rewards.answers import Answer, PlainError, Scorable, TookTooLongError, as_error
from rltrain.rewards.functions import RewardFunction, await_calls, call, load_reward
from rltrain.runtime.machine import become_worker, kill_worker, start_worker

# Worker processes in the scorer. They start on demand and are killed after a timeout.

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds for a worker to import the function's module. Also the limit of its first call, because it may import
more."""
LESS_AFTER_A_HANG = 8
"""After each consecutive hang in a first call, the next first call has this many times less time."""
SAY_AFTER_S = 10.0
"""Seconds until a wait is reported."""
READ_BYTES = 65536


@dataclass(slots=True, eq=False)
class Request:
    """The calls sent to a process at once. An asynchronous function can have many, any other function one."""

    function: RewardFunction
    calls: Sequence[Sequence[Scorable]]
    sample_limit_s: float

    @property
    def limit_s(self) -> float:
        """Seconds of the call with the most samples."""
        return self.sample_limit_s * max(map(len, self.calls))

    @property
    def patience_s(self) -> float:
        """Seconds until the process must answer. An asynchronous worker enforces `limit_s` itself, so it has twice as
        long."""
        return 2 * self.limit_s if self.function.asynchronous else self.limit_s

    @property
    def described(self) -> str:
        """The number of samples in words: "1 sample"."""
        count = sum(map(len, self.calls))
        return f"{count} sample{'s' * (count > 1)}"

    @property
    def alone(self) -> list["Request"]:
        """One request per call."""
        return [Request(self.function, [samples], self.sample_limit_s) for samples in self.calls]

    def message(self, patience_s: float) -> dict[str, Any]:
        """Returns the message to a process that must answer within `patience_s`."""
        fields = self.function.convention.fields
        calls = [[sample.message(fields) for sample in samples] for samples in self.calls]
        return {"calls": calls, "limit_s": self.sample_limit_s * patience_s / self.patience_s}

    def not_replied(self, error: Exception) -> "Reply":
        """Returns the reply for a process without an answer: `error` for every sample."""
        answer = as_error(error)
        return Reply([answer for samples in self.calls for _ in samples])


@dataclass(frozen=True)
class Reply:
    """The result of a request."""

    answers: Sequence[Answer]
    """Answers for the samples of all calls."""
    seconds: float | None = None
    """Seconds of the calls. None if the process is gone."""


class SharedState:
    """The common state of a function's worker processes."""

    def __init__(self, function: RewardFunction, start_message: dict[str, Any]) -> None:
        self.function, self.start_message = function, start_message
        self.longest: Request | None = None
        """The slowest successful request."""
        self.longest_s = -1.0
        self.silence_is_told = False

    def consider(self, request: Request, reply: Reply) -> None:
        scored = any(answer.score is not None for answer in reply.answers)
        if scored and reply.seconds is not None and reply.seconds > self.longest_s:
            self.longest, self.longest_s = request, reply.seconds

    def forget(self, request: Request) -> None:
        if self.longest is request:
            self.longest, self.longest_s = None, -1.0

    def tell_silence(self, what: str, limit_s: float, why: str) -> None:
        """Warns after SAY_AFTER_S of waiting for `what`. The wait ends after `limit_s`, and `why` names that limit."""
        if self.silence_is_told:
            return
        self.silence_is_told = True
        logger.warning(
            "reward %s has not answered for %g s: waiting for %s, at most %g s (%s). Further waits of this scoring are "
            "not reported",
            *(self.function.name, SAY_AFTER_S, what, limit_s, why),
        )


class WorkerProcess:
    """One worker process and its pipes. It starts on demand, and again after it ended.

    The first call of a process imports modules such as torch. It may take START_TIMEOUT_S, and an eighth of that after
    each consecutive hang. It repeats the slowest successful request so far, because that request needed the same
    imports. Before the first success, the first call is the current request. If it exceeds its own limit, it is sent
    again. So every sample has the same time.
    """

    def __init__(self, shared: SharedState) -> None:
        self.shared, self.function = shared, shared.function
        self.num_hung_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Request) -> Reply:
        """Returns the process's reply to `request`."""
        while not self._is_running():
            self._start()
            first = self.shared.longest or request
            reply = self._first_call(first)
            if first is request and (reply.seconds or 0.0) <= request.limit_s:
                return reply
        limit = self.function.time_limit(request.sample_limit_s)
        why = "reward.timeout_s and reward.retries" if self.function.remote else limit
        return self._call(request, request.patience_s, why, limit)

    def _first_call(self, request: Request) -> Reply:
        limit_s = max(START_TIMEOUT_S / LESS_AFTER_A_HANG**self.num_hung_starts, request.patience_s)
        why = "the first call of its process, which may import more than its file does"
        reply = self._call(request, limit_s, why, f"{limit_s:g} s in the first call of its process")
        if reply.seconds is not None:
            self.num_hung_starts = 0
        else:
            self.num_hung_starts += any(answer.timeout for answer in reply.answers)
        return reply

    def _call(self, request: Request, limit_s: float, why: str, limit: str) -> Reply:
        """Returns the process's reply. Without one, the process is killed, because it exceeded `limit` or ended."""
        assert self.process is not None
        try:
            tell = partial(self.shared.tell_silence, request.described, limit_s, why)
            message = _ask(self.process, request.message(limit_s), limit_s, tell)
        except (EOFError, OSError) as error:
            self.kill()
            self.shared.forget(request)
            is_late = isinstance(error, TimeoutError)
            return request.not_replied(TookTooLongError(limit) if is_late else PlainError("ended its process"))
        answers = [Answer(**answer) for of_call in message["answers"] for answer in of_call]
        reply = Reply(answers, message["seconds"])
        self.shared.consider(request, reply)
        return reply

    def _is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            kill_worker(process)

    def _start(self) -> None:
        self.process = process = start_worker("rltrain.rewards.worker")
        try:
            tell = partial(self.shared.tell_silence, "its process to start", START_TIMEOUT_S, "it imports its file")
            _ask(process, self.shared.start_message, START_TIMEOUT_S, tell)
        except (EOFError, OSError) as error:
            self.kill()
            raise ConfigError(
                f"{self.function.config_key}.function: the worker process of {self.function.name!r} did not start "
                f"({type(error).__name__}); see its message on standard error"
            ) from error


def _ask(
    process: "subprocess.Popen[bytes]", message: dict[str, Any], timeout_s: float, on_silence: Callable[[], None]
) -> dict[str, Any]:
    """Returns the worker's reply to one message. Calls `on_silence` once after SAY_AFTER_S.

    Raises TimeoutError, or EOFError or OSError if the process is gone.
    """
    assert process.stdin is not None and process.stdout is not None
    unsent = memoryview(json.dumps(message).encode() + b"\n")
    while unsent:  # a signal may interrupt a write
        unsent = unsent[process.stdin.write(unsent) :]
    start, received, is_told = time.monotonic(), bytearray(), False
    deadline, say_at = start + timeout_s, start + SAY_AFTER_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            until = deadline if is_told else min(deadline, say_at)
            if not selector.select(max(until - time.monotonic(), 0)):
                if until == deadline:
                    raise TimeoutError
                is_told = True
                on_silence()
                continue
            chunk = os.read(process.stdout.fileno(), READ_BYTES)
            if not chunk:
                raise EOFError
            received += chunk
    reply: dict[str, Any] = json.loads(received)
    return reply


# The worker processes of one function, and their threads.


class FunctionWorkers:
    """Runs one reward function. A trusted function runs in this process, any other in worker processes. So even a hang
    in C code ends.

    A worker starts at its first sample, is killed if a sample exceeds the limit, and ends with this process. Imports of
    a new worker do not count toward a sample's time (see WorkerProcess). A batch may take the limit once per sample. A
    worker awaits `calls_in_flight` calls of an asynchronous function at a time. A remote judge has one worker with
    `num_workers` calls in flight. `on_scored` is called after every request, from any thread.
    """

    def __init__(self, function: RewardFunction, settings: schema.Reward, on_scored: Callable[[], None]) -> None:
        self.function = function
        self.limit_s = function.limit_s(settings.timeout_s)
        self.on_scored = on_scored
        num_workers, calls_in_flight = settings.num_workers, settings.calls_in_flight
        if function.remote:
            num_workers, calls_in_flight = 1, num_workers
        self.calls_in_flight = calls_in_flight if function.asynchronous else 1
        start = {
            "function": function.name,
            "options": dict(function.options),
            "score_key": function.named_score,
            "timeout_s": settings.timeout_s,
            "retries": settings.retries,
        }
        self._shared = SharedState(function, start)
        self.processes = [WorkerProcess(self._shared) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self.processes:
            self._idle.put(process)
        # Linux ends a worker with the thread that started it, so these threads live as long as the workers.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._begun: list[Future[list[Answer]]] = []
        """Futures of the latest `begin`."""

    def begin(self, samples: Sequence[Scorable]) -> list[Future[list[Answer]]]:
        """Starts scoring and returns futures with the answers, in the order of `samples`. Those of a trusted function
        are already done."""
        if self.function.trusted:
            there: Future[list[Answer]] = Future()
            there.set_result([call(self.function, [sample])[0] for sample in samples])
            return [there]
        if all(future.done() for future in self._begun):
            self._shared.silence_is_told = False
        self._begun = [self._threads.submit(self._ask, request) for request in self._requests(samples)]
        return self._begun

    def close(self) -> None:
        """Ends the processes. Nothing can be scored afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.kill()

    def _requests(self, samples: Sequence[Scorable]) -> list[Request]:
        """Groups the samples into requests and spreads them evenly over the workers."""
        if self.function.convention.batched:
            calls = [list(group) for _, group in groupby(samples, key=attrgetter("group"))]
        else:
            calls = [[sample] for sample in samples]
        share = min(self.calls_in_flight, -(-len(calls) // len(self.processes)))
        return [
            Request(self.function, calls[start : start + share], self.limit_s)
            for start in range(0, len(calls), max(share, 1))
        ]

    def _ask(self, request: Request) -> list[Answer]:
        process = self._idle.get()
        try:
            return self._answers(process, request)
        finally:
            self._idle.put(process)

    def _answers(self, process: WorkerProcess, request: Request) -> list[Answer]:
        """Returns the answers to a request. If a process died or hung with several calls, each is repeated alone."""
        reply = process.ask(request)
        self.on_scored()
        if reply.seconds is None and len(request.calls) > 1:
            return [answer for alone in request.alone for answer in self._answers(process, alone)]
        return [*reply.answers]


# The worker process.


def answers_to(requests: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields one answer per line of `requests`. Ends after the last complete line."""
    function = None
    with asyncio.Runner() as loop:  # one loop for all calls, because a function may keep connections
        for line in requests:
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            if function is None:
                function = load_reward(schema.Reward(**message))
                yield {"ready": True}
                continue
            start = time.monotonic()
            calls = [[Scorable(**sample) for sample in samples] for samples in message["calls"]]
            if function.asynchronous:
                answers = loop.run(await_calls(function, calls, message["limit_s"]))
            else:
                answers = [call(function, samples) for samples in calls]
            told = [[vars(answer) for answer in of_call] for of_call in answers]
            yield {"answers": told, "seconds": time.monotonic() - start}


def main() -> None:
    requests, answers = become_worker()
    for answer in answers_to(requests):
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
