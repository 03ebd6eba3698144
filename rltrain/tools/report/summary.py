"""The report on the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.tools.report.curves import documentation
from rltrain.tools.report.facts import Fact, column, number
from rltrain.tools.report.occupation import PURPOSES, Occupation
from rltrain.tools.report.run_folder import Run

# Metrics in the table, where a run has them.
SHOWN = (
    "rollout/reward_mean",
    "eval/score",
    "rollout/response_length_mean",
    "train/loss",
    "train/reference_kl",
    "train/entropy",
    "train/grad_norm",
    "train/staleness_max",
    "critic/loss",
    "critic/explained_variance",
    "perf/step_time_s",
    "perf/weight_sync_s",
    "perf/weight_sync_gb_per_s",
)


def print_summary(
    console: Console,
    run: Run,
    facts: Sequence[Fact],
    occupations: Sequence[Occupation],
    task_seconds: Mapping[str, float],
) -> None:
    """Facts, metrics, where the time went, and what could not be read."""
    console.print(Text(f"Run {run.path}", style="bold"))
    for fact in facts:
        console.print(
            Text(f"  {fact.label}: {fact.value} {fact.unit} {f'({fact.note})' if fact.note else ''}".rstrip())
        )
    if run.records:
        console.print(_metrics_table(run))
    if occupations:
        console.print(_occupation_table(occupations))
        longest = ", ".join(f"{name} {seconds:.1f}" for name, seconds in task_seconds.items())
        console.print(Text(f"seconds of work by task, all ranks: {longest}"))
    for note in run.notes:
        console.print(Text(f"note: {note}"))


def _metrics_table(run: Run) -> Table:
    table = Table("metric", "first", "last", "least", "most")
    for name in SHOWN:
        if values := column(run.records, name):
            unit = documentation(name)[0]
            shown = (values[0], values[-1], min(values), max(values))
            table.add_row(Text(f"{name} [{unit}]" if unit else name), *(number(value, unit) for value in shown))
    return table


def _occupation_table(occupations: Sequence[Occupation]) -> Table:
    table = Table("role", "ranks", *PURPOSES, "idle")
    for occupation in occupations:
        shares = [f"{occupation.fraction(purpose):.1%}" for purpose in PURPOSES]
        ranks = str(len(occupation.ranks))
        table.add_row(Text(occupation.role), ranks, *shares, f"{occupation.idle_fraction:.1%}")
    return table
