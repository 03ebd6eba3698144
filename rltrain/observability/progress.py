"""The run on the terminal: a progress bar, or plain lines if the output is no terminal."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from rltrain.config.evaluation import SHORT_FORM, has_reached
from rltrain.config.schema import Config
from rltrain.observability.names import waiting_task, working_task

# Metric, label and format of the values shown, in this order. Metrics missing in a run are left out.
SHOWN = (
    ("rollout/reward_mean", "reward", "{:.3f}"),
    ("eval/score", "held-out", "{:.3f}"),
    ("train/accuracy", "accuracy", "{:.3f}"),
    ("eval/accuracy", "held-out accuracy", "{:.3f}"),
    ("eval/loss", "held-out loss", "{:.4f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("perf/rollout_tokens_per_s", "rollout tokens/s", "{:,.0f}"),
    ("perf/train_tokens_per_s", "train tokens/s", "{:,.0f}"),
)


def shown_of(config: Config) -> list[tuple[str, str, str]]:
    """Returns SHOWN with the scores of evaluation sets after the score of data.eval."""
    sets = [(f"{plan.prefix}/score", plan.name, "{:.3f}") for plan in config.evaluations if plan.name != SHORT_FORM]
    place = [name for name, *_ in SHOWN].index("eval/score") + 1
    return [*SHOWN[:place], *sets, *SHOWN[place:]]


def checkpoints_of(config: Config) -> str:
    """Returns a line on the checkpoints from which an interrupted run continues."""
    settings = config.checkpoint
    every = [_each(settings.save_interval)] if settings.save_interval else []
    every += [f"every {settings.save_every_s:g} s"] if settings.save_every_s else []
    kept = [f"{', '.join([*every, 'and when the run is stopped'])}, in {config.checkpoint_dir}"] if every else []
    if settings.memory:
        kept.append(f"{_each(settings.memory.interval)} in the nodes' memory")
    if kept:
        return f"checkpoints: {'; '.join(kept)}; the same command continues from the newest"
    return (
        "checkpoints: none, as checkpoint.save_interval and checkpoint.save_every_s are 0; an interrupted run "
        "starts again from its first step"
    )


def _each(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


PRODUCTS = {"hf": "model", "metrics.jsonl": "metrics", "samples.jsonl": "samples"}
"""Files in a run's folder, and what they contain."""


class Progress:
    """A display of each step's metrics, and at the end of the seconds by task. For one rank of the job.

    On a terminal it shows a bar at the bottom. Elsewhere it prints one line per `interval_s`, one for every evaluation,
    and one at the end. With logging.progress: false it prints nothing.
    """

    def __init__(
        self,
        config: Config,
        *,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.total_steps = config, config.steps
        self.stopped_early = False
        self.shown = shown_of(config)
        self.scores = {
            "eval/score",
            "eval/accuracy",
            "eval/loss",
            *(f"{plan.prefix}/score" for plan in config.evaluations),
        }
        self.enabled = config.logging.progress
        self.console = console or Console()
        self.interval_s = interval_s
        self.clock = clock
        self.start_s = clock()
        self.last_line_s = self.start_s
        self.latest: dict[str, float] = {}
        self.task_seconds: dict[str, float] = {}
        self.waited_s = 0.0
        self.num_done = 0
        self.line: str | None = None
        """Line of the latest record, or None if it is printed."""
        self.closed = False
        self.bar: tuple[RichProgress, TaskID] | None = None
        if self.enabled and self.console.is_terminal:
            self.bar = self._start_bar()

    def say(self, line: str) -> None:
        """Prints `line`, above the bar if there is one."""
        if self.enabled:
            self._print(line)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of `step`, counted from 0, or late ones of an earlier step.

        A last record may follow the last training step.
        """
        self.latest.update(metrics)
        for name, seconds in metrics.items():
            if task := working_task(name):
                self.task_seconds[task] = self.task_seconds.get(task, 0.0) + seconds
            elif waiting_task(name):
                self.waited_s += seconds
        if not self.enabled:
            return
        self.stopped_early = step == self.total_steps and self.num_done < step and self._reached() is not None
        if not self.stopped_early:
            self.num_done = max(self.num_done, min(step + 1, self.total_steps))
        num_done = self.num_done
        left, values = self._left(num_done), self._values()
        if self.bar is not None:
            bar, bar_task = self.bar
            bar.update(bar_task, completed=num_done, left=left, values=values)
            return
        self.line = "  ".join([f"step {num_done}/{self.total_steps}", *values, left])
        if self._line_is_due(num_done, metrics):
            self.last_line_s = self.clock()
            self._print_line()

    def close(self) -> None:
        """Restores the terminal. Prints the last line, the seconds by task and the files of the run."""
        if self.closed:
            return
        self.closed = True
        if self.bar is not None:
            self.bar[0].stop()
        self._print_line()
        if self.stopped_early:
            self._print(f"stopped after step {self.num_done} of {self.total_steps}: {self._reached()}")
        if self.enabled and self.task_seconds:
            longest_first = sorted(self.task_seconds.items(), key=lambda item: -item[1])
            parts = ", ".join(f"{task} {seconds:.1f}" for task, seconds in longest_first)
            whole_s = self.clock() - self.start_s
            self._print(f"seconds by task: {parts}; waiting in them {self.waited_s:.1f}; whole run {whole_s:.1f}")
            self._print_products()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_bar(self) -> tuple[RichProgress, TaskID]:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(max_width=20)),
            TextColumn("{task.fields[left]}"),
            FittingColumn(),
        )
        bar = RichProgress(*columns, console=self.console)
        bar.start()
        return bar, bar.add_task("train", total=self.total_steps, left="starting", values=[])

    def _values(self) -> list[str]:
        return [f"{label} {form.format(self.latest[name])}" for name, label, form in self.shown if name in self.latest]

    def _left(self, num_done: int) -> str:
        elapsed_s = self.clock() - self.start_s
        return f"left {format_duration(elapsed_s / num_done * (self.total_steps - num_done))}"

    def _reached(self) -> str | None:
        """Returns the metric that has reached evaluation.stop_at, in words, or None."""
        goal = self.config.evaluation.stop_at
        metric = self.config.stop_metric
        if goal is None or metric not in self.latest or not has_reached(metric, self.latest[metric], goal):
            return None
        return f"{metric} {self.latest[metric]:.4g} reached evaluation.stop_at {goal:g}"

    def _print_products(self) -> None:
        """Prints the files in the run's folder, and the command that shows them."""
        folder = Path(self.config.output_dir)
        left = [f"{what} {name}" for name, what in PRODUCTS.items() if (folder / name).exists()]
        if left:
            self._print(f"results in {folder}: {', '.join(left)}. To see them: rltrain report {folder}")

    def _line_is_due(self, num_done: int, metrics: Mapping[str, float]) -> bool:
        """Returns whether a line is due. For the last step `close` prints it, because a record of the last evaluation
        may follow."""
        is_time = not self.scores.isdisjoint(metrics) or self.clock() - self.last_line_s >= self.interval_s
        return is_time and num_done < self.total_steps

    def _print_line(self) -> None:
        if self.line is not None:
            self._print(self.line)
        self.line = None

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class FittingColumn(ProgressColumn):
    """The first of a task's `values` that fit beside the other columns. None is cut."""

    def render(self, task: Task) -> "Fitting":
        return Fitting(task.fields["values"])


class Fitting:
    def __init__(self, values: Sequence[str]) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = ""
        for value in self.values:
            longer = f"{text}  {value}" if text else value
            if len(longer) > options.max_width:
                break
            text = longer
        yield Text(text, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, min(len("  ".join(self.values)), options.max_width))


def format_duration(seconds: float) -> str:
    """Returns hours, minutes and seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
