"""The process that runs an untrusted reward function: `python -m rltrain.rewards.worker`, started by the scorer.

It reads JSON lines from standard input. The first is {"function", "options", "score_key", "timeout_s", ...}, as in the
Each of the others asks for rewards: of one sample, {"prompt", "response", "label"} with the fields that the function
needs besides, or of several calls with a list of samples each, {"calls", "limit_s"}, which are awaited together where
the function is asynchronous. It answers each line with one of its own: an Answer of answers.py, or {"answers"}, a list
for each call, with "seconds", the time that the calls took. The answer to the first says that the function is ready. It
ends quietly when nobody reads them any more.
"""

import asyncio
import json
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.rewards.answers import Answer, Scorable
from rltrain.rewards.functions import RewardFunction, await_calls, call, load_reward
from rltrain.runtime.machine import become_worker, kill_worker, start_worker


def answers_to(requests: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """One for each line of `requests`. Ends with them, or with a line that its writer did not live to complete."""
    function = None
    with asyncio.Runner() as loop:  # one for all calls: a function may keep connections between them
        for line in requests:
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            if function is None:
                function = load_reward(schema.Reward(**message))
                yield {"value": 0.0}
                continue
            start = time.monotonic()
            answer = _answer(function, message, loop)
            yield {**answer, "seconds": time.monotonic() - start}


def _answer(function: RewardFunction, message: dict[str, Any], loop: asyncio.Runner) -> Answer:
    if "calls" not in message:
        return call(function, [Scorable(**message)])[0]
    calls = [[Scorable(**sample) for sample in samples] for samples in message["calls"]]
    if function.asynchronous:
        return {"answers": loop.run(await_calls(function, calls, message["limit_s"]))}
    return {"answers": [call(function, samples) for samples in calls]}


def main() -> None:
    requests, answers = become_worker()
    for answer in answers_to(requests):
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()


# A worker process as the scorer sees it: started when it is needed, killed where it takes too long.

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For a worker to import the function's module, and again for the first call, which imports what it still lacks."""
LESS_AFTER_A_HANG = 8
"""A first call may take so many times less after each one in a row that does not return."""
SAY_AFTER_S = 10.0
"""A wait of this length is reported."""
READ_BYTES = 65536


@dataclass(slots=True, eq=False)
class Request:
    """Calls that a process is asked for at once: those of an asynchronous function are awaited together, of any other
    there is one."""

    function: RewardFunction
    calls: Sequence[Sequence[Scorable]]
    sample_limit_s: float

    @property
    def limit_s(self) -> float:
        """Of a call with as many samples as any here."""
        return self.sample_limit_s * max(map(len, self.calls))

    @property
    def patience_s(self) -> float:
        """Until the process has to answer. One that awaits keeps the limit itself, and has as long again to say so."""
        return 2 * self.limit_s if self.function.asynchronous else self.limit_s

    @property
    def described(self) -> str:
        """Returns how many samples it is about: "1 sample"."""
        count = sum(map(len, self.calls))
        return f"{count} sample{'s' * (count > 1)}"

    @property
    def alone(self) -> list["Request"]:
        """A request for each call."""
        return [Request(self.function, [samples], self.sample_limit_s) for samples in self.calls]

    def message(self, patience_s: float) -> dict[str, Any]:
        """For a process that has so long to answer."""
        fields = self.function.convention.fields
        if not (self.function.asynchronous or self.function.convention.batched):
            return self.calls[0][0].message(fields)
        calls = [[sample.message(fields) for sample in samples] for samples in self.calls]
        return {"calls": calls, "limit_s": self.sample_limit_s * patience_s / self.patience_s}

    def answers(self, reply: dict[str, Any]) -> list[list[Answer]]:
        """By call, of what the process replied or of why it did not."""
        if "answers" in reply:
            answers: list[list[Answer]] = reply["answers"]
            return answers
        return [[reply for _ in samples] for samples in self.calls]


class Longest:
    """The request that took longest of those that got a number, from whichever worker, and its seconds."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.seconds = -1.0

    def consider(self, request: Request, reply: dict[str, Any]) -> None:
        answers = (answer for answers in request.answers(reply) for answer in answers)
        if reply.get("seconds", -1.0) > self.seconds and any("value" in answer for answer in answers):
            self.request, self.seconds = request, reply["seconds"]

    def forget(self, request: Request) -> None:
        if self.request is request:
            self.request, self.seconds = None, -1.0


class Silence:
    """Reports that a reward function does not answer, once until `end`, whichever process waits for it."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self._is_told = False

    def tell(self, what: str, limit_s: float, why: str) -> None:
        """Called after SAY_AFTER_S of a wait for `what`, which ends after `limit_s` in all; `why` names that limit."""
        if self._is_told:
            return
        self._is_told = True
        logger.warning(
            "reward %s has not answered for %g s: waiting for %s, at most %g s (%s). Further waits of this scoring are "
            "not reported",
            *(self.function.name, SAY_AFTER_S, what, limit_s, why),
        )

    def end(self) -> None:
        """Lets the next wait be reported."""
        self._is_told = False


class WorkerProcess:
    """One worker process, started when it is first needed and again after it ended, and the pipes to it.

    The first call in a process imports what the function's module does not, torch for one. It may take START_TIMEOUT_S,
    and an eighth of that after each in a row that does not return. It is made with the request that took longest so
    far: one that met those imports. As long as there is none it is made with the request at hand, which is asked once
    more where it took longer than it may. So no sample has more or less than its time.
    """

    def __init__(
        self, function: RewardFunction, start_message: dict[str, Any], longest: Longest, silence: Silence
    ) -> None:
        self.function = function
        self.silence = silence
        self.start_message = start_message
        self.longest = longest
        self.num_hung_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Request) -> dict[str, Any]:
        """What the process replied to `request`, or {"timeout": text} or {"error": text} where it did not."""
        while not self._is_running():
            self._start()
            first = self.longest.request or request
            reply = self._first_call(first)
            if first is request and reply.get("seconds", 0.0) <= request.limit_s:
                return reply
        each = " for each sample of its batch" if self.function.convention.batched else ""
        limit = f"reward.timeout_s = {request.sample_limit_s:g}{each}"
        why = "reward.timeout_s and reward.retries" if self.function.remote else limit
        return self._call(request, request.patience_s, why, f"took longer than {limit}")

    def _first_call(self, request: Request) -> dict[str, Any]:
        limit_s = max(START_TIMEOUT_S / LESS_AFTER_A_HANG**self.num_hung_starts, request.patience_s)
        why = "the first call of its process, which may import more than its file does"
        reply = self._call(request, limit_s, why, f"took longer than {limit_s:g} s in the first call of its process")
        if "timeout" in reply:
            self.num_hung_starts += 1
        elif "seconds" in reply:
            self.num_hung_starts = 0
        return reply

    def _call(self, request: Request, limit_s: float, why: str, otherwise: str) -> dict[str, Any]:
        """The reply of the process, which is gone where there is none: {"timeout": `otherwise`} or an error."""
        assert self.process is not None
        try:
            tell = partial(self.silence.tell, request.described, limit_s, why)
            reply = _ask(self.process, request.message(limit_s), limit_s, tell)
        except (EOFError, OSError) as error:
            self.kill()
            self.longest.forget(request)
            return {"timeout": otherwise} if isinstance(error, TimeoutError) else {"error": "ended its process"}
        self.longest.consider(request, reply)
        return reply

    def _is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        kill_worker(process)

    def _start(self) -> None:
        self.process = process = start_worker("rltrain.rewards.worker")
        try:
            tell = partial(self.silence.tell, "its process to start", START_TIMEOUT_S, "it imports its file")
            _ask(process, self.start_message, START_TIMEOUT_S, tell)
        except (EOFError, OSError) as error:
            self.kill()
            raise ConfigError(
                f"{self.function.config_key}.function: the worker process of {self.function.name!r} did not start "
                f"({type(error).__name__}); its own message is on standard error"
            ) from error


def _ask(
    process: "subprocess.Popen[bytes]", message: dict[str, Any], timeout_s: float, on_silence: Callable[[], None]
) -> dict[str, Any]:
    """Returns the worker's reply to one message, and calls `on_silence` where there is none after SAY_AFTER_S.

    Raises TimeoutError, or EOFError / OSError if the process is gone.
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
