"""The host of a rank's environments. It runs episodes in worker processes, so errors and hangs cost episodes only."""

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

# The connection of a rank to one worker process.

WORKER_MODULE = "rltrain.environments.worker"
READ_BYTES = 1 << 16
GRACE_S = 5.0
"""Seconds beyond the limit of a call, for workers that end late calls themselves (concurrent environments)."""

Kind = Literal["reset", "step", "get_state", "load_state", "offload", "onload", "close"]


@dataclass(frozen=True)
class Description:
    """A worker's description of its environments."""

    concurrent: bool
    """True if calls of a process are awaited concurrently. False if a process makes one call at a time."""
    saved: bool
    offloaded: bool
    tools: Sequence[Json] = ()


@dataclass(eq=False)
class WorkerCall:
    """A call to a worker. `batch` is None if the call is for all environments of a process."""

    number: int
    kind: Kind
    batch: EpisodeBatch | None
    limit_s: float
    builds: bool = False
    """True if the worker has to build an environment for this call."""
    sent: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class WorkerAnswer:
    """A worker's answer to a call, with a result or a `failure`."""

    result: Json
    seconds: float
    failure: EpisodeFailure | None
    is_rid: bool
    """True if the worker has discarded the environment."""


@dataclass(frozen=True)
class LostWorker:
    """The reason why a process is gone or has to be killed: the `culprits` and their `failure`."""

    failure: EpisodeFailure
    culprits: Sequence[WorkerCall]


class Patience:
    """The time limit of first calls. It halves after each consecutive hang, over all processes."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_hung = 0

    @property
    def seconds(self) -> float:
        return self.start_s / 2**self.num_hung


class WorkerConnection:
    """One worker process and the pipes to it. It starts at the first call, and again after a loss.

    No method blocks. Calls wait in the pipe. A process without concurrency takes them in order, so the first of `calls`
    is running. It has run since it was sent, or since the previous answer.
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
        """The worker's description. None until the process is ready."""
        self.calls: dict[int, WorkerCall] = {}
        self._clear()

    def _clear(self) -> None:
        self._unsent, self._received = bytearray(), bytearray()
        self._free_environments, self._num_environments = [0], 1  # the first is built at the start
        self._is_warm = self._is_ended = self._has_exited = False
        self._idle_since = time.monotonic()

    def start(self) -> None:
        """Starts the process if it is not running."""
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
        """Returns (an environment number without a batch, whether that environment must still be built)."""
        if self._free_environments:
            return self._free_environments.pop(), False
        self._num_environments += 1
        return self._num_environments - 1, True

    def return_environment(self, number: int) -> None:
        self._free_environments.append(number)

    def call(self, call: WorkerCall, message: dict[str, Any]) -> None:
        """Sends a call. `answers` yields its answer."""
        self.start()
        self.calls[call.number] = call
        self._send({"call": call.number, "do": call.kind, "limit_s": self._limit_of(call), **message})

    def _send(self, message: Json) -> None:
        self._unsent += to_line(message)
        self.write()

    def write(self) -> None:
        """Writes as many of the unsent bytes as the pipe takes."""
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
        """Yields the received answers with their calls. Raises ConfigError if the process refuses to start."""
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
            return EpisodeFailure("episode_time", f"{took}, the rest of env.episode_timeout_s")
        if limit_s > call.limit_s:
            return EpisodeFailure("step_time", f"{took}, in one of the first calls of its process or environment")
        return EpisodeFailure("step_time", f"{took} (env.step_timeout_s)")

    def deadline(self) -> float | None:
        """Returns the latest time for the next call of `loss`, or None without a limit."""
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
        """Returns a loss if the process has ended or must end. Call it after `answers`. Raises ConfigError if the
        process did not even start."""
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
        """Returns whether all writers closed the pipe, or the process had exited before the last read of `answers`. A
        forked child can keep the pipe open after the exit."""
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
            "built; see its message on standard error"
        )

    def kill(self) -> list[WorkerCall]:
        """Kills the process and all its children, and returns the running calls. The next call starts a new process."""
        calls = list(self.calls.values())
        self.calls.clear()
        process, self.process, self.description = self.process, None, None
        if process is not None:
            for pipe in (self._stdin, self._stdout):
                if pipe.fileno() in self.selector.get_map():
                    self.selector.unregister(pipe)
            kill_worker(process)
        return calls


# The host of a rank. It never blocks the rank.

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks of silent processes."""
GATHER_S = 0.05
"""Seconds without a new episode before an incomplete batch starts. Engines send the episodes of a task one by one."""
CLOSE_S = 5.0
"""Seconds for all environments to close before their processes are killed."""
MAX_LOGGED_FAILURES = 10
PLAYED = ("reset", "step")
"""The calls of an episode. They have its limits and count toward its time."""


class EnvironmentHost:
    """Runs the episodes of one rank. Only one thread may use it, and that thread must live as long as the host.

    `begin` begins an episode, `act` sends the model's action, and `events` returns the results. None of them blocks. Up
    to `batch_size` consecutive episodes share an environment. They step once all unfinished ones have acted. `events`
    and `wait` start an incomplete batch after GATHER_S, and `flush` at once. A batch runs in the process with the
    fewest episodes and stays there.

    `describe`, `events` and `wait` raise ConfigError if env.function cannot be used. `on_event` is called at every
    received event.
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
        """Number of live episodes per worker."""
        self._begun: list[tuple[int, Row, int]] = []
        self._last_begun = 0.0
        """Time of the last `begin`."""
        self._batches: dict[int, EpisodeBatch] = {}
        """Batch of every episode that is not done, or has unread events."""
        self._events: list[EpisodeEvent] = []
        self._controls: dict[int, Json] = {}
        self._numbers = count()
        self._logged_failures: set[str] = set()
        for worker in self._workers:
            worker.start()

    def describe(self) -> Description:
        """Returns the description of the environments. Waits at most start_s until the first process has built one."""
        while True:
            for worker in self._workers:
                if worker.description is not None:
                    return worker.description
            self._workers[0].start()
            self._receive(LOOK_S)

    def begin(self, episode: int, row: Row, seed: int) -> None:
        """Begins an episode. `episode` is any number without another episode on this host."""
        if episode in self._batches or any(episode == number for number, _, _ in self._begun):
            raise ValueError(f"episode {episode} has begun already")
        self._begun.append((episode, row, seed))
        self._last_begun = time.monotonic()
        if len(self._begun) == self.batch_size:
            self.flush()

    def flush(self) -> None:
        """Starts the begun episodes, even if they are fewer than a batch."""
        if self._begun:
            self._reset(EpisodeBatch.of(self._begun))
            self._begun = []

    def act(self, episode: int, action: Action) -> None:
        """Sends the model's action to an episode. Does nothing if the episode has ended. Its last event reports the
        end."""
        batch = self._batches[episode]
        if episode not in batch.live:
            return
        batch.actions[episode] = action
        self._step_if_all_acted(batch)

    def abandon(self, episode: int) -> None:
        """Gives up an episode. No more events come from it."""
        self._begun = [begun for begun in self._begun if begun[0] != episode]
        self._events = [event for event in self._events if event.episode != episode]
        batch = self._batches.pop(episode, None)
        if batch is not None and episode in batch.live:
            self._end(batch, episode)
            self._step_if_all_acted(batch)

    def events(self) -> list[EpisodeEvent]:
        """Returns the events since the last call."""
        self._gather()
        self._receive(0.0)
        events, self._events = self._events, []
        for event in events:
            if event.done:
                self._batches.pop(event.episode, None)
        return events

    def wait(self, seconds: float) -> bool:
        """Waits until there is an event, at most `seconds`. Returns whether there is one."""
        end = time.monotonic() + seconds
        while not self._events:
            remaining = end - time.monotonic()
            self._receive(max(min(remaining, self._gather()), 0.0))
            if remaining <= 0:
                break
        return bool(self._events)

    def _gather(self) -> float:
        """Starts an incomplete batch if no episode has begun for GATHER_S. Returns the seconds until it would start."""
        remaining = self._last_begun + GATHER_S - time.monotonic()
        if self._begun and remaining <= 0:
            self.flush()
        return remaining if self._begun else LOOK_S

    def save(self) -> list[SavedBatch]:
        """Returns the state of all episodes for a checkpoint. Empty if the environment cannot save them.

        Waits for running calls, within their limits. Read `events` afterwards and save them too. The state includes the
        actions of batches that cannot step yet.
        """
        self.flush()
        self._settle()
        batches = [batch for batch in dict.fromkeys(self._batches.values()) if batch.live]
        calls = {self._call(batch, "get_state"): batch for batch in batches if self._describe(batch).saved}
        self._settle()
        return [batch.save(self._controls.pop(number)) for number, batch in calls.items() if number in self._controls]

    def resume(self, saved: Sequence[SavedBatch]) -> list[int]:
        """Continues saved episodes. Returns the lost episodes, which are forgotten.

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
        """Makes environments offload or restore their device memory, and waits for them. Does nothing if they do not
        support it. Raises ConfigError if an environment fails."""
        if not self.describe().offloaded:
            return
        self._settle()
        for worker in self._workers:
            if worker.process is not None:
                worker.call(WorkerCall(next(self._numbers), kind, None, self.limits.start_s), {})
        self._settle()

    def close(self) -> None:
        """Closes the environments of idle processes, within CLOSE_S for all, and kills all processes. The host cannot
        be used afterwards."""
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
        """Assigns the batch to the process with the fewest live episodes and reserves an environment there."""
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
        """Waits until no call is running."""
        while any(worker.calls for worker in self._workers):
            self._receive(LOOK_S)

    def _receive(self, seconds: float) -> None:
        """Handles received data for at most `seconds`, and ends overdue processes."""
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
        """Kills a lost worker. Batches without a finished reset begin elsewhere. The others fail."""
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
        """Fails all live episodes of the batch."""
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
        """Logs a failure, unless a similar one was logged before."""
        num_said = len(self._logged_failures)
        self._logged_failures.add(failure.alike)
        if num_said < len(self._logged_failures) <= MAX_LOGGED_FAILURES:
            last = len(self._logged_failures) == MAX_LOGGED_FAILURES
            more = "further failures" if last else "further ones like it"
            function = self.factory.function
            logger.warning("environment %s, episodes %s: %s (%s are only counted)", function, episodes, failure, more)
