"""How far a conversion is, in bytes, over all its processes."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from rltrain.checkpoint.conversion.processes import Processes


class ConversionProgress:
    """A bar on the terminal of the first process; nothing elsewhere. Every process tells what it has done.

    `console` is where the bar appears if it is a terminal, by default standard error.
    """

    def __init__(self, processes: Processes, what: str, total_bytes: int, *, console: Console | None = None) -> None:
        self.processes = processes
        self.done = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = console or Console(stderr=True)
        shown = processes.first and console.is_terminal
        self.bar = RichProgress(*columns, TimeRemainingColumn(), console=console, disable=not shown)
        self.task = self.bar.add_task(what, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are done by this process."""
        self.done += num_bytes
        over_all = self.processes.add("bytes done", num_bytes)
        self.bar.update(self.task, completed=self.done if self.processes.count == 1 else over_all)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.bar.disable:  # rich 14 and earlier would print an empty line
            self.bar.stop()
