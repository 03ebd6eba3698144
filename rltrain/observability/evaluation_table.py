"""The end of a run that evaluates a checkpoint: a table for people, and a file for programs."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rltrain.config.schema import Config
from rltrain.errors import cannot_write

OF_TRAINING = "policy_version"
"""Says nothing of a checkpoint."""
EVALUATION_FILE = "evaluation.json"


class EvaluationTable:
    """Prints what is reported of each evaluation set, and writes it to <output_dir>/evaluation.json:
    {"checkpoint": folder, "sets": {name: {metric: value}}}. For one rank of the job. ConfigError where the file cannot
    be written."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config, self.console = config, console or Console()
        self.path = Path(config.output_dir, EVALUATION_FILE)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        sets = {
            plan.name: {
                own: value
                for name, value in metrics.items()
                if (own := plan.own_name(name)) is not None and own != OF_TRAINING
            }
            for plan in self.config.evaluations
        }
        report = {"checkpoint": self.config.model.path, "sets": sets}
        try:
            self.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self.config.logging.progress:
            self.console.print(_table(self.config.model.path, sets))
            self.console.print(f"written to {self.path}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left to write."""


def _table(title: str, sets: Mapping[str, Mapping[str, float]]) -> Table:
    """A row for each metric, a column for each set."""
    table = Table(title=title)
    table.add_column("metric")
    for name in sets:
        table.add_column(name, justify="right")
    for metric in dict.fromkeys(metric for values in sets.values() for metric in values):
        row = (values.get(metric) for values in sets.values())
        table.add_row(metric, *("" if value is None else f"{value:.4g}" for value in row))
    return table
