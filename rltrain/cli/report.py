"""What became of a run: a summary here, and a page and a merged trace in its folder.

    rltrain report RUN [--output DIR]

RUN is the output_dir of a run that ended or still goes on. Into DIR (default: RUN/report) go report.html (one file that
needs no network) and trace.json (all ranks, for https://ui.perfetto.dev, with logging.trace).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.cli.report_page import render, timeline
from rltrain.cli.report_run import (
    PURPOSES,
    Fact,
    Occupation,
    Run,
    column,
    documentation,
    facts,
    merged_trace,
    number,
    occupations,
    read_run,
    sections,
    task_seconds,
)
from rltrain.errors import DataError, UserError, command_name

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


def report(path: Path, output: Path, console: Console) -> list[Path]:
    """Print the summary and write everything else; the files made. Errors: DataError."""
    run = read_run(path)
    roles, rows, curves = occupations(run.ranks), timeline(run.ranks), sections(run.records, run.ranks)
    known = facts(run, roles)
    print_summary(console, run, known, roles, task_seconds(run.ranks))
    try:
        output.mkdir(parents=True, exist_ok=True)
        made = [output / "report.html"]
        made[0].write_text(render(run, known, roles, rows, curves), encoding="utf-8")
        if run.ranks:
            made.append(output / "trace.json")
            made[1].write_text(merged_trace(run.ranks), encoding="utf-8")
    except OSError as error:
        raise DataError(f"--output {output}: cannot write there: {error.strerror}") from error
    return made


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where the run cannot be read."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of the run")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the files go (default: RUN/report)")
    arguments = parser.parse_args(argv)
    console = Console()
    try:
        made = report(arguments.run.resolve(), arguments.output or arguments.run / "report", console)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for path in made:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
