"""Runs episodes in worker processes of this rank: an error costs an episode, a hang is killed."""

import json
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from rltrain.environments.batch import (
    EnvironmentFactory,
    EpisodeBatch,
    EpisodeEvent,
    EpisodeFailure,
    EpisodeLimits,
    SavedBatch,
)
from rltrain.environments.encoding import Json, decode_observation, decode_trajectory, to_line
from rltrain.environments.interface import Action, Row
from rltrain.errors import ConfigError
from rltrain.runtime.machine import kill_worker, start_worker

# A rank's end of one worker process: what was asked of it, what has come back, and whether it is lost.

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
class WorkerCall:
    """`batch` is None of a call to all environments of a process."""

    number: int
    kind: Kind
    batch: EpisodeBatch | None
    limit_s: float
    builds: bool = False
    """An environment is built for it."""
    sent: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class WorkerAnswer:
    """`failure`: in the place of a result."""

    result: Json
    seconds: float
    failure: EpisodeFailure | None
    is_rid: bool
    """The worker has given up the environment."""


@dataclass(frozen=True)
class LostWorker:
    """A process is gone or has to go: through `culprits`, by `failure`."""

    failure: EpisodeFailure
    culprits: Sequence[WorkerCall]


class Patience:
    """How long first calls may take: half as long after each in a row that did not return, in whichever process."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_hung = 0

    @property
    def seconds(self) -> float:
        return self.start_s / 2**self.num_hung


class WorkerConnection:
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
        self.calls: dict[int, WorkerCall] = {}
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
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self.selector.register(self._stdout, selectors.EVENT_READ, self)
        self._send(self.factory.as_message())

    def take_environment(self) -> tuple[int, bool]:
        """(a number that no batch has, whether an environment has still to be built for it)."""
        if self._free_environments:
            return self._free_environments.pop(), False
        self._num_environments += 1
        return self._num_environments - 1, True

    def return_environment(self, number: int) -> None:
        self._free_environments.append(number)

    def call(self, call: WorkerCall, message: dict[str, Any]) -> None:
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

    def answers(self) -> Iterator[tuple[WorkerCall, WorkerAnswer]]:
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
            if "refused" in message:
                raise ConfigError(message["refused"])
            if self.description is None:
                self.description = Description(**message["description"])
            elif (call := self.calls.pop(message["call"], None)) is not None:
                yield call, self._answer(call, message)

    def _answer(self, call: WorkerCall, message: Json) -> WorkerAnswer:
        limit_s, seconds = self._limit_of(call), message["seconds"]
        if call.kind == "step":
            self._is_warm = True
            self.patience.num_hung = 0
        failure = None
        if "error" in message:
            failure = EpisodeFailure("error", message["error"], message["traceback"])
        elif "timeout" in message or seconds > limit_s:
            failure = self._over_limit(call, limit_s)
        return WorkerAnswer(message.get("result"), seconds, failure, "result" not in message)

    def _limit_of(self, call: WorkerCall) -> float:
        is_first = not self._is_warm or call.builds
        return max(call.limit_s, self.patience.seconds) if is_first else call.limit_s

    def _over_limit(self, call: WorkerCall, limit_s: float) -> EpisodeFailure:
        took = f"{call.kind} took longer than {limit_s:.3g} s"
        if limit_s < self.limits.step_s:
            return EpisodeFailure("episode_time", f"{took}, all that env.episode_timeout_s left")
        if limit_s > call.limit_s:
            return EpisodeFailure("step_time", f"{took}, in one of the first calls of its process or environment")
        return EpisodeFailure("step_time", f"{took} (env.step_timeout_s)")

    def deadline(self) -> float | None:
        """When `loss` has to be asked for at the latest."""
        if self.process is None:
            return None
        if self.description is None:
            return self._idle_since + self.limits.start_s
        deadlines = [self._deadline_of(call) for call in self._at_work()]
        return min(deadlines) if deadlines else None

    def _at_work(self) -> list[WorkerCall]:
        calls = list(self.calls.values())
        return calls if self.description is not None and self.description.concurrent else calls[:1]

    def _deadline_of(self, call: WorkerCall) -> float:
        assert self.description is not None
        since = call.sent + GRACE_S if self.description.concurrent else max(call.sent, self._idle_since)
        return since + self._limit_of(call)

    def loss(self, now: float) -> LostWorker | None:
        """Whether the process has ended or must, once `answers` has been read. Raises ConfigError where it has not
        even begun."""
        if self.process is None:
            return None
        ended = self._has_ended()
        if self.description is None:
            self._check_start(now, ended)
            return None
        if ended:
            return LostWorker(EpisodeFailure("process", "the environment's process ended by itself"), self._at_work())
        overdue = next((call for call in self._at_work() if now > self._deadline_of(call)), None)
        if overdue is None:
            return None
        limit_s = self._limit_of(overdue)
        if not self._is_warm or overdue.builds:
            self.patience.num_hung += 1
        return LostWorker(self._over_limit(overdue, limit_s), [overdue])

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

    def kill(self) -> list[WorkerCall]:
        """With all that it has started. Returns the calls that were under way; it starts anew at the next one."""
        calls = list(self.calls.values())
        self.calls.clear()
        process, self.process, self.description = self.process, None, None
        if process is not None:
            for pipe in (self._stdin, self._stdout):
                if pipe.fileno() in self.selector.get_map():
                    self.selector.unregister(pipe)
            kill_worker(process)
        return calls


# Runs episodes in worker processes of this rank: an error costs an episode, a hang is killed, the rank never waits.

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a wait looks whether a process is there that says nothing."""
CLOSE_S = 5.0
"""For all environments to close, before their processes are killed."""
MAX_LOGGED_FAILURES = 10
PLAYED = ("reset", "step")
"""Calls that are an episode's own: they have its limits, and count to its time."""


class EnvironmentHost:
    """Owned by one rank, and used by one thread of it, which also has to live as long as it does.

    `begin` begins an episode, `act` answers it with what the model drew, `events` says what has come of either. None
    of them blocks. Up to `batch_size` episodes that are begun one after the other share an environment, and step when
    all of them that are not done have acted; what has been begun when `events`, `wait` or `flush` is called goes ahead,
    so that no batch waits for episodes that nobody begins. A batch stays in its process, the one with the fewest
    episodes at the time.

    Raises ConfigError from `describe`, `events` or `wait` where env.function cannot be used. `on_event` is called for
    every event, when it is received.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        num_workers: int,
        batch_size: int = 1,
        limits: EpisodeLimits | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        self.factory = factory
        self.batch_size = batch_size
        self.limits = limits or EpisodeLimits()
        self.on_event = on_event
        self._selector = selectors.DefaultSelector()
        patience = Patience(self.limits.start_s)
        self._workers = [WorkerConnection(factory, self.limits, patience, self._selector) for _ in range(num_workers)]
        self._loads = [0] * num_workers
        """Live episodes of each."""
        self._begun: list[tuple[int, Row, int]] = []
        self._batches: dict[int, EpisodeBatch] = {}
        """Of every episode that is not done, or of whose end nobody has heard."""
        self._events: list[EpisodeEvent] = []
        self._controls: dict[int, Json] = {}
        self._numbers = count()
        self._logged_failures: set[str] = set()
        for worker in self._workers:
            worker.start()

    def describe(self) -> Description:
        """What the environments are, once the first process has built one. Waits for that, at most start_s."""
        while True:
            for worker in self._workers:
                if worker.description is not None:
                    return worker.description
            self._workers[0].start()
            self._receive(LOOK_S)

    def begin(self, episode: int, row: Row, seed: int) -> None:
        """`episode`: any number that no other episode here has."""
        if episode in self._batches or any(episode == number for number, _, _ in self._begun):
            raise ValueError(f"episode {episode} has begun already")
        self._begun.append((episode, row, seed))
        if len(self._begun) == self.batch_size:
            self.flush()

    def flush(self) -> None:
        """What has been begun goes ahead, be it less than a batch."""
        if self._begun:
            self._reset(EpisodeBatch.of(self._begun))
            self._begun = []

    def act(self, episode: int, action: Action) -> None:
        """An episode that has ended meanwhile takes no notice: its last event tells."""
        batch = self._batches[episode]
        if episode not in batch.live:
            return
        batch.actions[episode] = action
        self._step_if_all_acted(batch)

    def abandon(self, episode: int) -> None:
        """Nobody wants it any more; no event of it comes from now on."""
        self._begun = [begun for begun in self._begun if begun[0] != episode]
        self._events = [event for event in self._events if event.episode != episode]
        batch = self._batches.pop(episode, None)
        if batch is not None and episode in batch.live:
            self._end(batch, episode)
            self._step_if_all_acted(batch)

    def events(self) -> list[EpisodeEvent]:
        """What has come since the last call."""
        self.flush()
        self._receive(0.0)
        events, self._events = self._events, []
        for event in events:
            if event.done:
                self._batches.pop(event.episode, None)
        return events

    def wait(self, seconds: float) -> bool:
        """Until there is an event, or so long. Returns whether there is one."""
        self.flush()
        end = time.monotonic() + seconds
        while not self._events:
            remaining = end - time.monotonic()
            self._receive(max(remaining, 0.0))
            if remaining <= 0:
                break
        return bool(self._events)

    def save(self) -> list[SavedBatch]:
        """The episodes that can go on from a checkpoint: none unless the environment can save them.

        Waits for the calls that are under way, within their limits. Take `events` after it, and save what they bring
        beside it. Actions of batches that cannot step yet are part of it.
        """
        self.flush()
        self._settle()
        batches = [batch for batch in dict.fromkeys(self._batches.values()) if batch.live]
        calls = {self._call(batch, "get_state"): batch for batch in batches if self._describe(batch).saved}
        self._settle()
        return [batch.save(self._controls.pop(number)) for number, batch in calls.items() if number in self._controls]

    def resume(self, saved: Sequence[SavedBatch]) -> list[int]:
        """Go on with them, as if they had never stopped. Returns the episodes that cannot, of which nothing is kept.

        Waits until their states are loaded, within the limits.
        """
        if not saved or not self.describe().saved:
            return [episode for batch in saved for episode in batch["live"]]
        batches = [EpisodeBatch.load(batch) for batch in saved]
        calls = {
            self._call(self._placed(batch), "load_state", state=message["state"]): batch
            for batch, message in zip(batches, saved, strict=True)
        }
        self._settle()
        lost = []
        for number, batch in calls.items():
            if self._controls.pop(number, None) and batch.live:
                self._step_if_all_acted(batch)
            else:
                lost += sorted(set(batch.episodes) & self._batches.keys())
        for episode in lost:
            self.abandon(episode)
        return lost

    def tell_all(self, kind: Literal["offload", "onload"]) -> None:
        """Have environments that hold device memory give it back, or take it again; waits until they have. Raises
        ConfigError where they cannot."""
        if not self.describe().offloaded:
            return
        self._settle()
        for worker in self._workers:
            if worker.process is not None:
                worker.call(WorkerCall(next(self._numbers), kind, None, self.limits.start_s), {})
        self._settle()

    def close(self) -> None:
        """Nothing can be begun afterwards. Environments of processes that are idle close first, all in CLOSE_S."""
        idle = [worker for worker in self._workers if worker.description is not None and not worker.calls]
        for worker in idle:
            worker.call(WorkerCall(next(self._numbers), "close", None, CLOSE_S), {})
        end = time.monotonic() + CLOSE_S
        while any(worker.calls for worker in idle) and time.monotonic() < end:
            self._selector.select(max(end - time.monotonic(), 0.0))
            for worker in idle:
                if any(True for _ in worker.answers()) or worker.loss(time.monotonic()):
                    worker.kill()
        for worker in self._workers:
            worker.kill()
        self._selector.close()

    def __enter__(self) -> "EnvironmentHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, batch: EpisodeBatch) -> Description:
        description = self._workers[batch.place].description
        assert description is not None, "a batch whose process is lost has no live episodes"
        return description

    def _reset(self, batch: EpisodeBatch) -> None:
        self._call(self._placed(batch), "reset", rows=batch.rows, seeds=batch.seeds)

    def _placed(self, batch: EpisodeBatch) -> EpisodeBatch:
        """In the process with the fewest live episodes, and an environment of its own there."""
        batch.place = self._loads.index(min(self._loads))
        self._loads[batch.place] += len(batch.live)
        self._workers[batch.place].start()
        batch.environment, batch.builds = self._workers[batch.place].take_environment()
        self._batches |= dict.fromkeys(batch.live, batch)
        return batch

    def _step_if_all_acted(self, batch: EpisodeBatch) -> None:
        if batch.can_step:
            self._call(batch, "step", actions=batch.take_actions())

    def _call(self, batch: EpisodeBatch, kind: Kind, **message: Any) -> int:
        batch.is_called = True
        call = WorkerCall(next(self._numbers), kind, batch, self._limit_s(batch, kind), builds=batch.builds)
        batch.builds = False
        self._workers[batch.place].call(call, {"environment": batch.environment, **message})
        return call.number

    def _limit_s(self, batch: EpisodeBatch, kind: Kind) -> float:
        if kind not in PLAYED:
            return self.limits.start_s
        if self.limits.episode_s is None:
            return self.limits.step_s
        return min(self.limits.step_s, self.limits.episode_s - batch.seconds)

    def _settle(self) -> None:
        """Until no call is under way."""
        while any(worker.calls for worker in self._workers):
            self._receive(LOOK_S)

    def _receive(self, seconds: float) -> None:
        """Take what has come, within so long, and give up what will not."""
        deadlines = [deadline for worker in self._workers if (deadline := worker.deadline()) is not None]
        now = time.monotonic()
        for key, events in self._selector.select(max(min([now + min(seconds, LOOK_S), *deadlines]) - now, 0.0)):
            if events & selectors.EVENT_WRITE:
                key.data.write()
        for worker in self._workers:
            for call, answer in worker.answers():
                self._answered(worker, call, answer)
            loss = worker.loss(time.monotonic())
            if loss is not None:
                self._lost(worker, loss)

    def _answered(self, worker: WorkerConnection, call: WorkerCall, answer: WorkerAnswer) -> None:
        batch = call.batch
        if batch is None:
            if answer.failure is not None:
                raise ConfigError(f"env.offload: {call.kind}() of {self.factory.function!r} failed: {answer.failure}")
            return
        batch.is_called = False
        if call.kind in PLAYED:
            batch.seconds += answer.seconds
        if answer.failure is None:
            self._take_result(batch, call, answer)
        else:
            self._fail(batch, answer.failure, answer.seconds)
        if answer.is_rid:
            batch.environment = -1
        elif not batch.live:
            worker.return_environment(batch.environment)
        self._step_if_all_acted(batch)

    def _take_result(self, batch: EpisodeBatch, call: WorkerCall, answer: WorkerAnswer) -> None:
        if call.kind == "get_state":
            self._controls[call.number] = answer.result
        elif call.kind == "load_state":
            self._controls[call.number] = True
        else:
            batch.turns += call.kind == "step"
            is_late = self.limits.episode_s is not None and batch.seconds >= self.limits.episode_s
            for episode, result in zip(batch.episodes, answer.result, strict=True):
                if result is not None and episode in batch.live and (result.get("done") or not is_late):
                    self._take_turn(batch, episode, result, answer.seconds)
            if is_late:
                limit = f"took longer than {self.limits.episode_s:g} s (env.episode_timeout_s)"
                self._fail(batch, EpisodeFailure("episode_time", limit), answer.seconds)

    def _take_turn(self, batch: EpisodeBatch, episode: int, result: Json, seconds: float) -> None:
        is_over = result.get("done", False)
        truncated = not is_over and batch.turns == self.limits.turns
        if is_over or truncated:
            self._leave(batch, episode)
        self._happened(
            EpisodeEvent(
                episode,
                decode_observation(result["observation"]),
                reward=result.get("reward", 0.0),
                done=is_over or truncated,
                info=result.get("info", {}),
                seconds=seconds,
                truncated=truncated,
                trajectories=tuple(map(decode_trajectory, result.get("trajectories", ()))),
            )
        )

    def _lost(self, worker: WorkerConnection, loss: LostWorker) -> None:
        """Its process ends; batches that it has not begun begin elsewhere, and those that it knows are lost."""
        place = self._workers.index(worker)
        not_begun = {call.batch for call in worker.kill() if call.kind in ("reset", "load_state")}
        culprits = {call.batch for call in loss.culprits}
        neighbour = EpisodeFailure(
            "neighbour", f"its process was ended because of another episode: {loss.failure.description}"
        )
        for batch in [batch for batch in dict.fromkeys(self._batches.values()) if batch.place == place]:
            batch.is_called = False
            if batch in culprits or not culprits:
                self._fail(batch, loss.failure)
            elif batch in not_begun and batch.rows:
                self._loads[place] -= len(batch.live)
                self._reset(batch)
            else:
                self._fail(batch, neighbour)

    def _fail(self, batch: EpisodeBatch, failure: EpisodeFailure, seconds: float = 0.0) -> None:
        """All its live episodes."""
        failed = [episode for episode in batch.episodes if episode in batch.live]
        for episode in failed:
            self._leave(batch, episode)
            self._happened(EpisodeEvent(episode, None, done=True, seconds=seconds, failure=failure))
        batch.actions.clear()
        if failed:
            self._log(failed, failure)

    def _end(self, batch: EpisodeBatch, episode: int) -> None:
        self._leave(batch, episode)
        batch.actions.pop(episode, None)
        if not batch.live and not batch.is_called and batch.environment >= 0:
            self._workers[batch.place].return_environment(batch.environment)

    def _leave(self, batch: EpisodeBatch, episode: int) -> None:
        batch.live.discard(episode)
        self._loads[batch.place] -= 1

    def _happened(self, event: EpisodeEvent) -> None:
        self._events.append(event)
        self.on_event()

    def _log(self, episodes: Sequence[int], failure: EpisodeFailure) -> None:
        """A failure like an earlier one is not said again."""
        num_said = len(self._logged_failures)
        self._logged_failures.add(failure.alike)
        if num_said < len(self._logged_failures) <= MAX_LOGGED_FAILURES:
            last = len(self._logged_failures) == MAX_LOGGED_FAILURES
            more = "further failures" if last else "further ones like it"
            function = self.factory.function
            logger.warning("environment %s, episodes %s: %s (%s are only counted)", function, episodes, failure, more)
