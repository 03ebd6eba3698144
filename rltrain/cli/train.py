"""The commands `rltrain train`, `rltrain dry-run` and launch/train.py."""

import argparse
import faulthandler
import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.errors import PlacementError, UserError
from rltrain.runtime.machine import launcher

if TYPE_CHECKING:
    from rltrain.config.schema import Config


OF_EVERY_CALL = ("config", "dry_run", "overrides")
OPTIONS = {"every_rank": "--ranks"}
"""Names of the dry run's options, if they differ from the name of the setting."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command on this rank. Returns the exit status: 0 for success, 2 for a mistake of the user, 1 for
    anything else."""
    if arguments.dry_run:
        from rltrain.planning.description import describe_job
        from rltrain.planning.options import DryRunOptions

        print(describe_job(arguments.config, arguments.overrides, DryRunOptions(**_asked(arguments))))
        return 0
    _refuse_options_of_dry_run(arguments)
    if "RANK" not in os.environ:
        raise UserError("start this script with torchrun --nproc-per-node N, or with --dry-run --world-size W")
    begin_as_rank()
    from rltrain.trainer import run_job

    return run_job(arguments.config, arguments.overrides)


def check(arguments: argparse.Namespace, worlds: Sequence[tuple[int, int]]) -> None:
    """Checks the arguments of `run` before any rank is started. Raises UserError if all `worlds` would be refused."""
    _refuse_options_of_dry_run(arguments)
    check_job(arguments.config, arguments.overrides, worlds)


def check_job(path: Path, overrides: Sequence[str], worlds: Sequence[tuple[int, int]]) -> None:
    """Calls `check_config_in` for a file with overrides."""
    from rltrain.config.loader import load_config

    check_config_in(load_config(path, overrides), worlds, "Start more ranks with --nproc-per-node")


def check_config_in(config: "Config", worlds: Sequence[tuple[int, int]], more_ranks: str) -> None:
    """Raises UserError if a config is impossible in all `worlds`, pairs of the number of ranks and the ranks of a node.

    Checks of weights, GPUs or the hub are left to the ranks. `more_ranks` is a hint for jobs of one rank about starting
    more.
    """
    from rltrain.data.hub import repositories_of
    from rltrain.models.of_roles import are_quickly_read
    from rltrain.planning.rows_and_rewards import refuse_missing_functions
    from rltrain.planning.validation import check_config
    from rltrain.planning.validation_schedule import place_config

    check_config(config)
    refuse_missing_functions(config)
    reads_models = not repositories_of(config) and are_quickly_read(config)
    refusals: list[UserError] = []
    for world_size, ranks_per_node in worlds:
        try:
            place_config(config, world_size, ranks_per_node, reads_models=reads_models)
        except UserError as error:
            refusals.append(error)
        else:
            return
    if len(refusals) == 1 and isinstance(refusals[0], PlacementError) and worlds[0][0] == 1:
        raise PlacementError(f"{refusals[0]}. {more_ranks}") from None
    if refusals:
        raise refusals[0]


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options of the dry run."""
    return {name: value for name, value in vars(arguments).items() if name not in OF_EVERY_CALL}


def _refuse_options_of_dry_run(arguments: argparse.Namespace) -> None:
    if asked := _asked(arguments):
        named = ", ".join(OPTIONS.get(name) or "--" + name.replace("_", "-") for name in asked)
        raise UserError(f"{named}: only valid with --dry-run; add --dry-run, or remove it")


def begin_as_rank() -> None:
    """Prepares this process as a rank, before the job's imports.

    Warnings of dependencies are silenced, as they repeat on every rank. A crash in a native library prints the stacks
    of all threads to standard error.
    """
    launcher()  # which may end while they are under way
    if not faulthandler.is_enabled():
        faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job listens, Ctrl-C ends a rank without a traceback
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = "Trains a language model as one torchrun job."
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the job would do; no torchrun, GPU or weights"
    )
    # Missing options have no attribute. Their defaults are in DryRunOptions.
    dry = parser.add_argument_group("for --dry-run", argument_default=argparse.SUPPRESS)
    dry.add_argument("--world-size", type=int, help="number of ranks (default 1)")
    dry.add_argument("--ranks-per-node", type=int, help="ranks of one node (default 8)")
    dry.add_argument("--gpu", help="a100, h100 (default), h200, b200, gb200, or a YAML file")
    dry.add_argument("--ranks", dest="every_rank", action="store_true", help="print every rank and pair of ranks")
    dry.add_argument("--search", action="store_true", help="propose the fastest placements and parallel sizes")
    dry.add_argument("--calibrate", type=Path, metavar="RUN", help="output_dir of a run to calibrate estimates with")
    dry.add_argument("--prompt-tokens", type=float, help="mean length (default: half of the limit)")
    dry.add_argument("--response-tokens", type=float, help="mean length (default: half of the limit)")
