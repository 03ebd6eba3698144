"""The run on the terminal: a progress bar, or plain lines where the output is no terminal."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from rltrain.config.schema import Config
from rltrain.observability.names import timed_task

# Metric, label and format of what is shown, in this order. A metric that a run does not have is left out.
SHOWN = (
    ("rollout/reward_mean", "reward", "{:.3f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("perf/rollout_tokens_per_s", "rollout tokens/s", "{:,.0f}"),
    ("perf/train_tokens_per_s", "train tokens/s", "{:,.0f}"),
    ("eval/score", "held-out", "{:.3f}"),
)


class Progress:
    """Shows each step's metrics, and at the end where the time went. For one rank of the job.

    On a terminal a bar at the bottom; elsewhere one line per `interval_s`, and one for every evaluation and for the
    last step. With logging.progress: false nothing is printed.
    """

    def __init__(
        self,
        config: Config,
        *,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = config.steps
        self.enabled = config.logging.progress
        self.console = console or Console()
        self.interval_s = interval_s
        self.clock = clock
        self.start_s = clock()
        self.last_line_s = self.start_s
        self.latest: dict[str, float] = {}
        self.task_seconds: dict[str, float] = {}
        self.closed = False
        self.bar: tuple[RichProgress, TaskID] | None = None
        if self.enabled and self.console.is_terminal:
            self.bar = self._start_bar()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` of `step`, which counts from 0; a last record may follow the last training step."""
        self.latest.update(metrics)
        for name, seconds in metrics.items():
            if (task := timed_task(name)) is not None:
                self.task_seconds[task] = self.task_seconds.get(task, 0.0) + seconds
        if not self.enabled:
            return
        num_done = min(step + 1, self.total_steps)
        status = self._status(num_done)
        if self.bar is not None:
            bar, bar_task = self.bar
            bar.update(bar_task, completed=num_done, status=status)
        elif self._line_is_due(num_done, metrics):
            self.last_line_s = self.clock()
            self._print(f"step {num_done}/{self.total_steps}  {status}")

    def close(self) -> None:
        """Leave the terminal as it was and print the seconds by task."""
        if self.closed:
            return
        self.closed = True
        if self.bar is not None:
            self.bar[0].stop()
        if self.enabled and self.task_seconds:
            longest_first = sorted(self.task_seconds.items(), key=lambda item: -item[1])
            parts = ", ".join(f"{task} {seconds:.1f}" for task, seconds in longest_first)
            self._print(f"seconds by task: {parts}; whole run {self.clock() - self.start_s:.1f}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_bar(self) -> tuple[RichProgress, TaskID]:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
        )
        bar = RichProgress(*columns, console=self.console)
        bar.start()
        return bar, bar.add_task("train", total=self.total_steps, status="starting")

    def _status(self, num_done: int) -> str:
        parts = [f"{label} {form.format(self.latest[name])}" for name, label, form in SHOWN if name in self.latest]
        elapsed_s = self.clock() - self.start_s
        parts.append(f"left {format_duration(elapsed_s / num_done * (self.total_steps - num_done))}")
        return "  ".join(parts)

    def _line_is_due(self, num_done: int, metrics: Mapping[str, float]) -> bool:
        is_notable = "eval/score" in metrics or num_done == self.total_steps
        return is_notable or self.clock() - self.last_line_s >= self.interval_s

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
