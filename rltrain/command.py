"""The command line of launch/train.py, `rltrain train` and `rltrain dry-run`."""

import argparse
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rltrain.errors import UserError
from rltrain.system.processes import launcher

EXIT_USER_ERROR = 2
OF_EVERY_CALL = ("config", "dry_run", "overrides")
OPTIONS = {"every_rank": "--ranks"}
"""Those of the dry run that are not named as what they set."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend, 1 anything else."""
    arguments = _parser().parse_intermixed_args(argv)
    asked = {name: value for name, value in vars(arguments).items() if name not in OF_EVERY_CALL}
    if not arguments.dry_run:
        if asked:
            named = ", ".join(OPTIONS.get(name) or "--" + name.replace("_", "-") for name in asked)
            print(f"rltrain: refused: {named}: for --dry-run alone; add that, or leave it out", file=sys.stderr)
            return EXIT_USER_ERROR
        if "RANK" not in os.environ:
            print(
                "rltrain: start me with torchrun --nproc-per-node N, or with --dry-run --world-size W", file=sys.stderr
            )
            return EXIT_USER_ERROR
        begin_as_rank()
        from rltrain.job import run_job

        return run_job(arguments.config, arguments.overrides)

    from rltrain.dry_run.description import describe_job
    from rltrain.dry_run.options import DryRunOptions

    try:
        print(describe_job(arguments.config, arguments.overrides, DryRunOptions(**asked)))
    except UserError as error:
        print(f"rltrain: refused: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def begin_as_rank() -> None:
    """Before the job's imports. The advice of dependencies repeats on every rank: missing optional packages,
    deprecations in each other's calls. A crash of a native library says on standard error where each thread was."""
    launcher()  # which may end while they are under way
    if not faulthandler.is_enabled():
        faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job listens, Ctrl-C ends a rank without a traceback
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/train.py", description="Train a language model as one torchrun job.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the job would do; no torchrun, GPU or weights"
    )
    # What is not given is not there: DryRunOptions has the defaults.
    dry = parser.add_argument_group("for --dry-run", argument_default=argparse.SUPPRESS)
    dry.add_argument("--world-size", type=int, help="number of ranks (default 1)")
    dry.add_argument("--ranks-per-node", type=int, help="ranks of one node (default 8)")
    dry.add_argument("--gpu", help="a100, h100 (default), h200, b200, gb200, or a YAML file")
    dry.add_argument("--ranks", dest="every_rank", action="store_true", help="a line for every rank and pair of ranks")
    dry.add_argument("--search", action="store_true", help="propose the fastest placements and parallel sizes")
    dry.add_argument("--calibrate", type=Path, metavar="RUN", help="output_dir of a run, to foretell seconds by")
    dry.add_argument("--prompt-tokens", type=float, help="mean length (default: half of the longest allowed)")
    dry.add_argument("--response-tokens", type=float, help="mean length (default: half of the longest allowed)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to override, dotted")
    return parser
