"""Where the time of a rank's tasks goes: into work, or into waits for others."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

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
