"""A rank's end of one worker process: what was asked of it, what has come back, and whether it is lost."""

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from rltrain.environments.batch import Batch, EpisodeLimits, Failure
from rltrain.environments.encoding import Json, to_line
from rltrain.environments.factory import EnvironmentFactory
from rltrain.errors import ConfigError
from rltrain.runtime.machine import kill_worker, start_worker

WORKER_MODULE = "rltrain.environments.worker"
READ_BYTES = 1 << 16
GRACE_S = 5.0
"""Beyond its limit for a call that the worker itself ends: those that are awaited beside each other."""

Kind = Literal["reset", "step", "get_state", "load_state", "offload", "onload", "close"]


@dataclass(frozen=True)
class Description:
    """What a worker says of its environments."""

    concurrent: bool
    """They are awaited beside each other; else one is called at a time."""
    saved: bool
    offloaded: bool
    tools: Sequence[Json] = ()


@dataclass(eq=False)
class Call:
    """`batch` is None of a call to all environments of a process."""

    number: int
    kind: Kind
    batch: Batch | None
    limit_s: float
    builds: bool = False
    """An environment is built for it."""
    sent: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Answer:
    """`failure`: in the place of a result."""

    result: Json
    seconds: float
    failure: Failure | None
    is_rid: bool
    """The worker has given up the environment."""


@dataclass(frozen=True)
class Loss:
    """A process is gone or has to go: through `culprits`, by `failure`."""

    failure: Failure
    culprits: Sequence[Call]


class Patience:
    """How long first calls may take: half as long after each in a row that did not return, in whichever process."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_hung = 0

    @property
    def seconds(self) -> float:
        return self.start_s / 2**self.num_hung


class Connection:
    """One worker process, started when it is first needed and again after it was lost, and the pipes to it.

    It never blocks. Calls wait in the pipe; a process that calls one environment at a time takes them in order, so
    that the first of `calls` is the one at work, since it was sent or since the answer before it was ready.
    """

    def __init__(
        self, factory: EnvironmentFactory, limits: EpisodeLimits, patience: Patience, selector: selectors.BaseSelector
    ) -> None:
        self.factory = factory
        self.limits = limits
        self.patience = patience
        self.selector = selector
        self.process: subprocess.Popen[bytes] | None = None
        self.description: Description | None = None
        """None until the process is ready."""
        self.calls: dict[int, Call] = {}
        self._clear()

    def _clear(self) -> None:
        self._unsent, self._received = bytearray(), bytearray()
        self._free_environments, self._num_environments = [0], 1  # the first is built at the start
        self._is_warm = self._is_ended = self._has_exited = False
        self._idle_since = time.monotonic()

    def start(self) -> None:
        """Unless it runs."""
        if self.process is not None:
            return
        self._clear()
        self.process = start_worker(WORKER_MODULE)
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self.selector.register(self._stdout, selectors.EVENT_READ, self)
        self._send(self.factory.as_message())

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process is not None and self.process.stdin is not None
        return self.process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout

    def take_environment(self) -> tuple[int, bool]:
        """(a number that no batch has, whether an environment has still to be built for it)."""
        if self._free_environments:
            return self._free_environments.pop(), False
        self._num_environments += 1
        return self._num_environments - 1, True

    def return_environment(self, number: int) -> None:
        self._free_environments.append(number)

    def call(self, call: Call, message: dict[str, Any]) -> None:
        """Its answer comes from `answers`."""
        self.start()
        self.calls[call.number] = call
        self._send({"call": call.number, "do": call.kind, "limit_s": self._limit_of(call), **message})

    def _send(self, message: Json) -> None:
        self._unsent += to_line(message)
        self.write()

    def write(self) -> None:
        """As much of what was not sent yet as the pipe takes."""
        had_more = self._stdin.fileno() in self.selector.get_map()
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin.fileno(), self._unsent)]
        except BlockingIOError:
            if not had_more:
                self.selector.register(self._stdin, selectors.EVENT_WRITE, self)
            return
        except BrokenPipeError:
            self._is_ended = True
        if had_more:
            self.selector.unregister(self._stdin)

    def answers(self) -> Iterator[tuple[Call, Answer]]:
        """Those that have come. Raises ConfigError where the process says that it cannot begin."""
        while self.process is not None and not self._is_ended:
            try:
                chunk = os.read(self._stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                break
            self._is_ended = not chunk
            self._received += chunk
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            self._idle_since = message["finished"]
            if self.description is None:
                self._begin(message)
            elif (call := self.calls.pop(message["call"], None)) is not None:
                yield call, self._answer(call, message)

    def _begin(self, message: Json) -> None:
        if "refused" in message:
            raise ConfigError(message["refused"])
        self.description = Description(**message["description"])

    def _answer(self, call: Call, message: Json) -> Answer:
        limit_s, seconds = self._limit_of(call), message["seconds"]
        if call.kind == "step":
            self._is_warm = True
            self.patience.num_hung = 0
        failure = None
        if "error" in message:
            failure = Failure("error", message["error"], message["traceback"])
        elif "timeout" in message or seconds > limit_s:
            failure = self._over_limit(call, limit_s)
        return Answer(message.get("result"), seconds, failure, "result" not in message)

    def _limit_of(self, call: Call) -> float:
        is_first = not self._is_warm or call.builds
        return max(call.limit_s, self.patience.seconds) if is_first else call.limit_s

    def _over_limit(self, call: Call, limit_s: float) -> Failure:
        took = f"{call.kind} took longer than {limit_s:.3g} s"
        if limit_s < self.limits.step_s:
            return Failure("episode_time", f"{took}, all that env.episode_timeout_s left")
        if limit_s > call.limit_s:
            return Failure("step_time", f"{took}, in one of the first calls of its process or environment")
        return Failure("step_time", f"{took} (env.step_timeout_s)")

    def deadline(self) -> float | None:
        """When `loss` has to be asked for at the latest."""
        if self.process is None:
            return None
        if self.description is None:
            return self._idle_since + self.limits.start_s
        deadlines = [self._deadline_of(call) for call in self._at_work()]
        return min(deadlines) if deadlines else None

    def _at_work(self) -> list[Call]:
        calls = list(self.calls.values())
        return calls if self.description is not None and self.description.concurrent else calls[:1]

    def _deadline_of(self, call: Call) -> float:
        assert self.description is not None
        since = call.sent + GRACE_S if self.description.concurrent else max(call.sent, self._idle_since)
        return since + self._limit_of(call)

    def loss(self, now: float) -> Loss | None:
        """Whether the process has ended or must, once `answers` has been read. Raises ConfigError where it has not
        even begun."""
        if self.process is None:
            return None
        ended = self._has_ended()
        if self.description is None:
            self._check_start(now, ended)
            return None
        if ended:
            return Loss(Failure("process", "the environment's process ended by itself"), self._at_work())
        overdue = next((call for call in self._at_work() if now > self._deadline_of(call)), None)
        if overdue is None:
            return None
        limit_s = self._limit_of(overdue)
        if not self._is_warm or overdue.builds:
            self.patience.num_hung += 1
        return Loss(self._over_limit(overdue, limit_s), [overdue])

    def _has_ended(self) -> bool:
        """Nobody can write any more; or, where a process that it has forked still could, it had exited before
        `answers` was read the last time."""
        assert self.process is not None
        had_exited = self._has_exited
        self._has_exited = self.process.poll() is not None
        return self._is_ended or had_exited

    def _check_start(self, now: float, ended: bool) -> None:
        if not ended and now <= self._idle_since + self.limits.start_s:
            return
        why = "ended" if ended else f"took longer than {self.limits.start_s:g} s"
        raise ConfigError(
            f"env.function: the worker process of {self.factory.function!r} {why} before its first environment was "
            "built; its own message is on standard error"
        )

    def kill(self) -> list[Call]:
        """With all that it has started. Returns the calls that were under way; it starts anew at the next one."""
        calls = list(self.calls.values())
        self.calls.clear()
        process, self.process, self.description = self.process, None, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and pipe.fileno() in self.selector.get_map():
                    self.selector.unregister(pipe)
            kill_worker(process)
        return calls
