"""What every rank is doing, published by a thread, and where its time goes."""

import json
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from rltrain.runtime.machine import JobThread, this_process

# Where the time of a rank's tasks goes: into work, or into waits for others.

Waiting = Callable[[str], AbstractContextManager[object]]
"""(what is waited for) -> a context around the wait."""


def unnoted(what: str) -> AbstractContextManager[object]:
    """For whoever waits where nobody asks how long."""
    return nullcontext()


@dataclass
class TaskTime:
    """Seconds of one task: of its own work, and of waits within it; none of another task done in the middle of it."""

    work_s: float = 0.0
    wait_s: float = 0.0


class TaskClock:
    """For one thread. Every moment counts once: to the innermost task or wait that is under way.

    `span`, where set, makes the span of a wait in a trace: (what is waited for, category "wait", task=the task's name).
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.span: Callable[..., AbstractContextManager[Any]] | None = None
        self._clock = clock
        self._under_way: list[tuple[str, TaskTime, bool]] = []
        """Task, its time, and whether it is a wait within it; the innermost last."""
        self._counted_to = 0.0

    @contextmanager
    def task(self, name: str) -> Iterator[TaskTime]:
        """Inside, a task is under way; its time is complete afterwards."""
        time_of_task = TaskTime()
        with self._inside(name, time_of_task, waits=False):
            yield time_of_task

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, the innermost task waits. Outside of tasks nothing is noted."""
        name, time_of_task, waits = self._under_way[-1] if self._under_way else ("", TaskTime(), True)
        if waits:
            yield
            return
        span = self.span(what, "wait", task=name) if self.span else nullcontext()
        with span, self._inside(name, time_of_task, waits=True):
            yield

    @contextmanager
    def _inside(self, name: str, time_of_task: TaskTime, waits: bool) -> Iterator[None]:
        self._count()
        self._under_way.append((name, time_of_task, waits))
        try:
            yield
        finally:
            self._count()
            self._under_way.pop()

    def _count(self) -> None:
        """Add what has passed since the last call to what is under way."""
        now = self._clock()
        if self._under_way:
            _, time_of_task, waits = self._under_way[-1]
            if waits:
                time_of_task.wait_s += now - self._counted_to
            else:
                time_of_task.work_s += now - self._counted_to
        self._counted_to = now


# What the threads of this process are doing, from their Python stacks.

COMMUNICATING_MODULES = (
    "torch.distributed",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.tensor_parallel.mappings",
)
"""A thread whose innermost Python frame is here is inside a collective or a transfer."""

COMMUNICATING_CALLS = (".wait(", "torch.cuda.synchronize(", "wait_stream(")
"""As is one that stands on a line with one of these: work handles are waited for wherever they are kept."""


def main_thread_communicates() -> bool:
    """Whether the main thread is inside a collective or a transfer, as far as its stack tells."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and communicates(frame)


def communicates(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    if any(module == known or module.startswith(f"{known}.") for known in COMMUNICATING_MODULES):
        return True
    number: int | None = frame.f_lineno  # None in a bytecode that stands for no line
    lines = linecache.getlines(frame.f_code.co_filename) or []  # None for code that a library has made up
    line = "".join(lines[number - 1 : number]) if number else ""
    return any(call in line for call in COMMUNICATING_CALLS)


def describe_threads() -> str:
    """The Python stacks of all threads, the main one first and innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


# What every rank is doing and whether it gets on, published by a thread so that others may look at any time.

INTERVAL_S = 1.0
KEYS_AT_ONCE = 64
"""Of one call of the store, whose server reads 4 kB of it at a time, each time from its beginning again: 4,096 keys at
once take it 31 ms, 64 at a time 5 ms."""


@dataclass(frozen=True)
class Wait:
    """A rank waits at `what` for other ranks: `ranks`, or where there are none of them named, for any other."""

    what: str
    ranks: tuple[int, ...]
    since: float


@dataclass(frozen=True)
class Beat:
    """What a rank said of itself. Times are seconds since the epoch by its own clock."""

    rank: int
    task: str = "starting"
    role: str = ""
    """The role or roles for which it does the task, in words."""
    step: int | None = None
    chunk: int = 0
    position: int | None = None
    """Of the task in the order of tasks, which is the same on all ranks; None for one done out of turn."""
    since: float = 0.0
    progress: int = 0
    """Grows with whatever gets done: tasks, tokens, micro-batches, bytes."""
    still_s: float = 0.0
    """Seconds since it last grew, of those in which the process ran."""
    alive: int = 0
    """Grows with every beat, as long as the process runs at all."""
    communicates: bool = False
    """Its main thread is inside a collective or a transfer, as far as its Python stack tells."""
    sequences: Mapping[str, int] | None = None
    """Process group, by a name equal on its ranks -> collectives that this rank has begun in it."""
    wait: Wait | None = None
    process: str = ""
    """In which the rank runs, as rltrain/runtime/machine.py names it."""
    finished: bool = False

    def __str__(self) -> str:
        """Such as "generate[3] (rollout)"."""
        step = "" if self.step is None else f"[{self.step}{f'.{self.chunk}' if self.chunk else ''}]"
        return f"{self.task}{step}" + (f" ({self.role})" if self.role else "")

    def encoded(self) -> str:
        return json.dumps(vars(self), default=vars)

    @staticmethod
    def decoded(text: str | bytes) -> "Beat":
        values = json.loads(text)
        if wait := values["wait"]:
            values["wait"] = Wait(wait["what"], tuple(wait["ranks"]), wait["since"])
        return Beat(**values)


class Heartbeat:
    """This rank's own. `begin` and `advance` set fields in memory: nothing is sent until the thread's next beat.

    `sequences`, where set, is called at every beat for the collectives begun per process group. It must leave out
    groups in which members begin unequal numbers of transfers.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        interval_s: float = INTERVAL_S,
        put: Callable[[Beat], None] | None = None,
    ) -> None:
        """The thread publishes by `put`, where others use `store` too: that serves one call at a time."""
        self.rank = rank
        self.interval_s = interval_s
        self.sequences: Callable[[], Mapping[str, int]] | None = None
        self.task_clock = TaskClock()
        self.board = Board(store)
        self._put = put or self.board.put
        self._task = Beat(rank, since=time.time())
        self._progress = 0
        self._progressed_at = time.monotonic()
        self._waits: list[Wait] = []
        self._num_beats = 0
        self._ended = threading.Event()
        self._publishing = threading.Lock()
        self._thread: JobThread | None = None

    def start(self) -> None:
        """Publish now, and every `interval_s` from a thread from now on. Once is enough."""
        if self._thread is None:
            self.publish()
            self._thread = JobThread(target=self._run, daemon=True, name="heartbeat")
            self._thread.start()

    def finish(self) -> None:
        """Say that this rank has done its part: nobody is to wait for it any more. Ends the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._task = Beat(self.rank, task="finished", since=time.time(), finished=True)
        self.advance()
        self.publish()

    def begin(
        self,
        task: str,
        role: str = "",
        step: int | None = None,
        chunk: int = 0,
        *,
        position: int | None = None,
    ) -> None:
        """This rank begins `task`, whose fields are as in Beat. That is progress too."""
        self._task = Beat(self.rank, task, role, step, chunk, position, since=time.time())
        self.advance()

    def advance(self, amount: int = 1) -> None:
        """Something got done. Concurrent calls may count as one, which does not matter: that it grows does."""
        self._progress += amount
        self._progressed_at = time.monotonic()

    @contextmanager
    def waiting(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Inside, this rank waits at `what` for `ranks` (none: any other). Of nested waits the inner one counts."""
        entered = Wait(what, tuple(ranks), time.time())
        self._waits.append(entered)
        try:
            with self.task_clock.waiting(what):
                yield
        finally:
            self._waits.remove(entered)
            self.advance()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Inside, this rank does something out of turn, which it is to `begin` with no position: a joint task that
        others need, in the middle of a task or wait of its own. Afterwards it is at that again.
        """
        outer = self._task, self._waits
        self._waits = []
        try:
            yield
        finally:
            self._task, self._waits = outer
            self.advance()

    def now(self) -> Beat:
        """What would be published at this moment."""
        return replace(
            self._task,
            progress=self._progress,
            still_s=time.monotonic() - self._progressed_at,
            alive=self._num_beats,
            communicates=main_thread_communicates(),
            sequences=None if self.sequences is None else dict(self.sequences()),
            wait=next(reversed(self._waits), None),
            process=this_process(),
        )

    def publish(self) -> None:
        """Publish now."""
        with self._publishing:
            self._num_beats += 1
            self._put(self.now())

    def _run(self) -> None:
        woken_at = time.monotonic()
        while not self._ended.wait(self.interval_s):
            slept_s, woken_at = time.monotonic() - woken_at, time.monotonic()
            if slept_s > 2 * self.interval_s:  # the process, or its machine, stood still
                self._progressed_at = min(self._progressed_at + slept_s - self.interval_s, woken_at)
            self.publish()


def batched(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    """For calls of the store."""
    return (ranks[first : first + KEYS_AT_ONCE] for first in range(0, len(ranks), KEYS_AT_ONCE))


class Posted(NamedTuple):
    """A beat as it stands in the store: `alive` can be read of thousands before the rest of one is."""

    rank: int
    alive: int
    text: bytes

    def beat(self) -> Beat:
        return Beat.decoded(self.text) if self.text else Beat(self.rank)


class Board:
    """The latest beat of every rank, in the store."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("heartbeat", store)
        self._come: set[int] = set()
        """Ranks that have published one."""

    @staticmethod
    def line(beat: Beat) -> str:
        """As it stands in the store."""
        return f"{beat.alive} {beat.encoded()}"

    def put(self, beat: Beat) -> None:
        self.store.set(str(beat.rank), self.line(beat))

    def put_lines(self, lines: Mapping[int, str]) -> None:
        """Those of several ranks, by one call."""
        self.store.multi_set([str(rank) for rank in lines], [*lines.values()])  # type: ignore[attr-defined]

    def read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The beats of `ranks`; one that has published none yet is starting."""
        return {posted.rank: posted.beat() for posted in self.posted(ranks)}

    def posted(self, ranks: Sequence[int]) -> list[Posted]:
        """The same, as they stand there; those that have published none come first."""
        missing = self._missing([rank for rank in ranks if rank not in self._come])
        present = [rank for rank in ranks if rank not in missing]
        texts = [text for some in batched(present) for text in self.store.multi_get([str(rank) for rank in some])]
        come = [(rank, *text.partition(b" ")) for rank, text in zip(present, texts, strict=True)]
        return [Posted(rank, 0, b"") for rank in missing] + [Posted(rank, int(n), text) for rank, n, _, text in come]

    def _missing(self, ranks: Sequence[int]) -> set[int]:
        unsure = [some for some in batched(ranks) if not self.store.check([str(rank) for rank in some])]
        missing = {rank for some in unsure for rank in some if not self.store.check([str(rank)])}
        self._come.update(rank for rank in ranks if rank not in missing)
        return missing
