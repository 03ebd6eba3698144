"""The command `rltrain doctor`: what is installed and allowed on this machine, and how the nodes of a job reach each
other. Under torchrun it examines all of them and prints one report.

Needs nothing but the standard library, so that it can say what else is missing."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rltrain.command import begin_as_rank
from rltrain.doctor.finding import has_fault, lines_of
from rltrain.doctor.installed import missing_packages, remedy, what_is_installed
from rltrain.doctor.limits import what_is_allowed
from rltrain.errors import command_name


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 a job could run here, 1 something that jobs need is missing or wrong."""
    options = _parser().parse_args(argv)
    begin_as_rank()
    if "RANK" in os.environ:
        from rltrain.doctor.job import examine_job

        return examine_job(options.sglang_python, options.shared or [Path.cwd()], options.mb << 20)
    findings = [*what_is_installed(options.sglang_python)]
    if not has_fault(findings):
        from rltrain.doctor.paths import paths_taken

        findings += paths_taken()
    findings += what_is_allowed(options.shared or [Path.cwd()])
    print("\n".join(lines_of(findings)))
    if missing_packages():
        print(f"\n{remedy()}")
    return int(has_fault(findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__)
    parser.add_argument("--sglang-python", type=Path, help="rollout.sglang.python, to ask whether it has SGLang")
    parser.add_argument(
        "--shared",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder that all nodes are to share, such as checkpoint.dir; may be repeated (default: this folder)",
    )
    parser.add_argument("--mb", type=int, default=64, help="how much is sent over links and written (default 64)")
    ranks = parser.add_argument_group("for torchrun, to examine ranks of this or several machines")
    for option in ("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"):
        ranks.add_argument(option, default=argparse.SUPPRESS)
    return parser
