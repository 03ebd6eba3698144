"""The timeline of one rank, in Chrome's trace format. Perfetto opens it."""

import atexit
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from rltrain.config.schema import Config
from rltrain.errors import writing
from rltrain.runtime.machine import JobThread

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
CLOSE_TIMEOUT_S = 5.0

# An event waiting to be written: phase, time in ns of time.perf_counter_ns, thread, name, category, arguments. The
# writing thread formats events, so recording one takes little time.
Event = tuple[str, int, int, str, str, dict[str, Any] | None]


class Trace:
    """The timeline of a rank. This class keeps nothing of it."""

    def span(self, name: str, category: str = "task", **arguments: Any) -> AbstractContextManager[object]:
        """Returns a context that records a span on this thread, from its start to its end. Spans of a thread nest.

        `category` selects the colour in the report: task, post, wait, sync, offload, onload or any other word.
        `arguments` are numbers and strings shown with the span. A span costs a few microseconds.
        """
        return NO_SPAN

    def counter(self, name: str, value: float) -> None:
        """Records a number that holds until the next one of the same name. Numbers that are not finite are left out."""

    def close(self) -> None:
        """Writes the remaining events. May be called again, and before an exit that ends no threads."""


NO_SPAN = nullcontext()


def start_trace(config: Config, rank: int, roles: Sequence[str]) -> Trace:
    """Returns the trace of this rank. It is written to a file if logging.trace is set."""
    return TraceFile(config.output_dir, rank, roles) if config.logging.trace else Trace()


class TraceFile(Trace):
    """A timeline in <output_dir>/trace/rank<rank>.json, written during the run: one process per rank, one track per
    thread.

    Times are microseconds of wall-clock time. They count from one reading of it, by a monotonic clock. All processes of
    a machine share this clock, so ranks line up. Any thread may call any method.

    The file lags at most half a second behind, and Perfetto can open it at any moment. The format allows an unfinished
    list, and the start of a span is a separate event. So the file also shows the last activity of a killed rank.
    Starting a run again in the same folder starts its trace again.

    Raises ConfigError if the file cannot be made. If a later write fails, a warning ends the trace but not the run.
    """

    def __init__(self, output_dir: str | Path, rank: int, roles: Sequence[str]) -> None:
        self.path = Path(output_dir, "trace", f"rank{rank}.json")
        with writing(self.path, "logging.trace"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        self.rank = rank
        self._epoch_ns = _wall_clock_at_zero()
        self._events: deque[Event] = deque()
        self._named_threads: set[int] = set()
        self._separator = "[\n"
        self._closing = threading.Event()
        self._is_open = True
        self._record("M", "process_name", "", {"name": f"rank {rank}: {', '.join(roles)}"})
        self._record("M", "process_sort_index", "", {"sort_index": rank})
        self._thread = JobThread(target=self._write_until_closed, name="trace writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def span(self, name: str, category: str = "task", **arguments: Any) -> AbstractContextManager[object]:
        return Span(self, name, category, arguments)

    def counter(self, name: str, value: float) -> None:
        if math.isfinite(value):
            self._record("C", name, "", {"value": float(value)})

    def close(self) -> None:
        self._is_open = False
        self._closing.set()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _record(self, phase: str, name: str, category: str, arguments: dict[str, Any] | None) -> None:
        if self._is_open:
            self._events.append((phase, time.perf_counter_ns(), threading.get_native_id(), name, category, arguments))

    def _write_until_closed(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(FLUSH_INTERVAL_S):
                    self._write_waiting()
                self._write_waiting()
                self._file.write("\n]\n")
        except OSError as error:
            self._is_open = False
            logger.warning("rank %d: its trace ends here: cannot write %s: %s", self.rank, self.path, error.strerror)

    def _write_waiting(self) -> None:
        parts = []
        for _ in range(len(self._events)):
            event = self._events.popleft()
            if event[2] not in self._named_threads:
                self._named_threads.add(event[2])
                parts += [self._separator, self._thread_name(event)]
                self._separator = ",\n"
            parts += [self._separator, self._format(event)]
        if parts:
            self._file.write("".join(parts))
            self._file.flush()

    def _thread_name(self, event: Event) -> str:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        thread = event[2]
        return self._format(("M", event[1], thread, "thread_name", "", {"name": names.get(thread, f"thread {thread}")}))

    def _format(self, event: Event) -> str:
        phase, time_ns, thread, name, category, arguments = event
        microseconds, rest_ns = divmod(self._epoch_ns + time_ns, 1000)
        text = (
            f'{{"ph":"{phase}","ts":{microseconds}.{rest_ns:03},"pid":{self.rank},"tid":{thread},"name":{_quoted(name)}'
        )
        if category:
            text += f',"cat":{_quoted(category)}'
        if arguments:
            plain = {key: _plain(value) for key, value in arguments.items()}
            text += f',"args":{json.dumps(plain, allow_nan=False)}'
        return text + "}"


class Span(AbstractContextManager[None]):
    """One recorded `with trace.span(...)`."""

    __slots__ = ("arguments", "category", "name", "trace")

    def __init__(self, trace: TraceFile, name: str, category: str, arguments: dict[str, Any]) -> None:
        self.trace, self.name, self.category, self.arguments = trace, name, category, arguments

    def __enter__(self) -> None:
        self.trace._record("B", self.name, self.category, self.arguments)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = None if kind is None else {"error": kind.__name__}
        self.trace._record("E", self.name, self.category, failed)


def _wall_clock_at_zero() -> int:
    """Returns the wall-clock ns when time.perf_counter_ns was 0, from the quickest of several readings."""
    readings = []
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _plain(value: Any) -> Any:
    """Returns a value for JSON. A value that JSON cannot hold becomes a string."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
