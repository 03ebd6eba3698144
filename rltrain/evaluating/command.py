"""The command line of launch/evaluate.py."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rltrain.command import KeyParser, add_torchrun_options, begin_as_rank, check_job, refuse
from rltrain.errors import UserError, command_name


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend, 1 anything else."""
    arguments = parser().parse_intermixed_args(argv)
    if "RANK" not in os.environ:
        return refuse(f"{command_name()}: start me with torchrun --nproc-per-node N, on one rank or more")
    begin_as_rank()
    try:
        overrides = _overrides(arguments)
    except UserError as error:
        return refuse(f"{command_name()}: refused: {error}")
    from rltrain.trainer import run_job

    return run_job(arguments.config, overrides)


def check(argv: Sequence[str], worlds: Sequence[tuple[int, int]]) -> None:
    """Refuse what `main` of the same arguments would refuse on the ranks of each of `worlds`, without any."""
    arguments = parser().parse_intermixed_args(argv)
    check_job(arguments.config, _overrides(arguments), worlds)


def _overrides(arguments: argparse.Namespace) -> list[str]:
    from rltrain.evaluating.overrides import evaluation_overrides

    return evaluation_overrides(
        arguments.config, arguments.overrides, checkpoint=arguments.checkpoint, output=arguments.output
    )


def parser() -> argparse.ArgumentParser:
    made = KeyParser(
        prog=command_name(),
        description="Evaluate a Hugging Face checkpoint by data.eval and evaluation.sets of a config.",
    )
    made.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder, or a name on the hub")
    made.add_argument("--config", type=Path, required=True, help="YAML file, as for launch/train.py")
    made.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for evaluation.json, metrics and samples; by default <output_dir>/evaluations/<name of the checkpoint>",
    )
    add_torchrun_options(made)
    made.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to override, dotted")
    return made
