"""What became of a run: a summary here, and a page and a merged trace in its folder.

    rltrain report RUN [--output DIR]

RUN is the output_dir of a run that ended or still goes on. Into DIR (default: RUN/report) go report.html (one file that
needs no network) and trace.json (all ranks, for https://ui.perfetto.dev, with logging.trace).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rltrain.errors import DataError, UserError, command_name
from rltrain.tools.report.curves import sections
from rltrain.tools.report.facts import facts
from rltrain.tools.report.occupation import occupations, task_seconds
from rltrain.tools.report.page import render
from rltrain.tools.report.run_folder import merged_trace, read_run
from rltrain.tools.report.summary import print_summary
from rltrain.tools.report.timeline import timeline


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
