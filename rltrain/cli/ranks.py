"""Starts the ranks of a job through torchrun, and prints the reason of their end as the last line."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rltrain.errors import FAILED, USER_ERROR, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


# The torchrun command.

TORCHRUN = (
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
)
MEETING = TORCHRUN[1:5] + TORCHRUN[6:]
"""Options that nodes need to find each other."""
MOST_WORLDS = 64
"""Most worlds to check for a range of nodes."""

Given = Mapping[str, str | None]
"""The values of torchrun's options. None if an option was not given."""


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Adds torchrun's options to the help of a command with ranks. The options are parsed by `torchrun_options`."""
    ranks = parser.add_argument_group(
        "ranks",
        "rltrain passes these options to torchrun, and also --node-rank, --master-addr,\n--master-port, "
        "--max-restarts and --rdzv-*.",
        argument_default=argparse.SUPPRESS,
    )
    ranks.add_argument("--nproc-per-node", metavar="N", help="ranks on each node (default 1)")
    ranks.add_argument("--nnodes", metavar="N", help="nodes, or a range such as 2:4 (default 1)")


def torchrun_options(arguments: Sequence[str]) -> tuple[Given, list[str]]:
    """Splits `arguments` into torchrun's options, with dashes or underscores, and the arguments of every rank."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in TORCHRUN:
        parser.add_argument(option, "--" + option[2:].replace("-", "_"), dest=option)
    given, rest = parser.parse_known_args(arguments)
    return vars(given), rest


def possible_worlds(given: Given, environment: Mapping[str, str]) -> list[tuple[int, int]]:
    """Returns (number of ranks, ranks of a node) for every possible world, the largest first.

    Empty if only torchrun knows them, for example with --nproc-per-node gpu. Raises UserError for values that torchrun
    would refuse.
    """
    fewest, most = _range_of("--nnodes", given["--nnodes"] or environment.get("PET_NNODES", "1"))
    per_node = given["--nproc-per-node"] or "1"
    if per_node in ("gpu", "auto") or most - fewest >= MOST_WORLDS:
        return []
    ranks = (os.cpu_count() or 1) if per_node == "cpu" else _count("--nproc-per-node", per_node, ", gpu, cpu or auto")
    return [(nodes * ranks, ranks) for nodes in range(most, fewest - 1, -1)]


def set_world(dry_run: argparse.Namespace, given: Given, environment: Mapping[str, str]) -> None:
    """Sets the world of a dry run from torchrun's options.

    Raises UserError if only torchrun knows the world, or if --world-size is different.
    """
    worlds = possible_worlds(given, environment)
    if not worlds:
        raise UserError(
            f"--nproc-per-node: got {given['--nproc-per-node']} with --dry-run; expected the number of ranks "
            "on each node"
        )
    world_size, ranks_per_node = worlds[0]
    if (asked := vars(dry_run).setdefault("world_size", world_size)) != world_size:
        raise UserError(
            f"--world-size: got {asked}, but --nproc-per-node and --nnodes make {world_size} ranks; expected "
            "only one of the two"
        )
    vars(dry_run).setdefault("ranks_per_node", ranks_per_node)


def has_torchrun() -> bool:
    """Returns whether torch is installed, without importing it."""
    return importlib.util.find_spec("torch") is not None


def start_ranks(name: str, arguments: Sequence[str]) -> int:
    """Replaces this process by torchrun, with `rltrain NAME` on every rank. Never returns. The default is one rank."""
    if not has_torchrun():
        raise ModuleNotFoundError("No module named 'torch'")
    command = torchrun_command(name, arguments)
    os.execv(command[0], command)


def torchrun_command(name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command line of torchrun. Its own options are taken from `arguments`. The rest goes to every rank."""
    given, rest = torchrun_options(arguments)
    options = {**given, "--nproc-per-node": given["--nproc-per-node"] or "1"}
    alone = all(given[option] is None for option in MEETING)
    spelled = [f"{option}={value}" for option, value in options.items() if value is not None]
    agent = [sys.executable, "-m", "rltrain.cli.ranks", *(["--standalone"] if alone else []), *spelled]
    return [*agent, "-m", "rltrain.cli.main", name, *rest]


def _range_of(option: str, text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    expected = ", or a range such as 2:4"
    found = _count(option, fewest, expected), _count(option, most or fewest, expected)
    if found[0] > found[1]:
        raise UserError(f"{option}: got {text}, a range that ends before it begins; expected {found[1]}:{found[0]}")
    return found


def _count(option: str, text: str, otherwise: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{option}: got {text}; expected a number of at least 1{otherwise}")
    return int(text)


# The agent of torchrun, as started by `rltrain train`. Its last line is the reason of its end.

SHUTDOWN_TIMEOUT_S = "310"
"""Seconds for ranks to save after a signal. Ranks already end by themselves after checkpoint.stop_within_s."""
RANK_MODULE = "rltrain.cli.main"
"""The module of the ranks. Ranks of rltrain.run have rltrain.cli.python_interface instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs torchrun with `arguments`. Returns 0 for success. A signal gives 128 plus its number. A failure gives the
    status of the failed rank: 2 for a mistake of the user, 1 for anything else."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = [*(sys.argv[1:] if arguments is None else arguments)]
    module, *rest = given[given.index("-m") + 1 :]
    name, *rest = rest if module == RANK_MODULE else ("run", *rest)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_TIMEOUT_S)
    options = torchrun.parse_args(given)
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it announces in five lines
    try:
        torchrun.run(options)
    except SignalException as stopped:
        reason, status = f"stopped by {stopped.sigval.name}{_way_on(name, rest)}", 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = _cause(failed.failures)
        reason, status = _reason(rank, failure), USER_ERROR if failure.exitcode == USER_ERROR else FAILED
        if failure.exitcode < 0:
            reason += _way_on(name, rest)
    else:
        return 0
    print(f"rltrain {name}: {reason}", file=sys.stderr, flush=True)
    return status


def _cause(failures: "Mapping[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """Returns the first failure with a message, or else the first failure."""
    told = {rank: failure for rank, failure in failures.items() if isinstance(failure.message, dict)}
    return min((told or failures).items(), key=lambda item: item[1].timestamp)


def _reason(rank: int, failure: "ProcessFailure") -> str:
    """Returns the reason of a rank's failure in one line."""
    if isinstance(failure.message, dict):
        return " ".join(line.strip() for line in failure.message["message"].splitlines() if line.strip())
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}: out of memory, or a crash"
    return f"rank {rank} ended with exit status {failure.exitcode} without a message; its output is above"


def _way_on(name: str, arguments: Sequence[str]) -> str:
    """Returns the hint on resuming an interrupted run."""
    if name not in ("train", "run"):
        return ""
    from rltrain.checkpoint.run_folder import way_on
    from rltrain.cli.main import parsed
    from rltrain.cli.python_interface import read_config
    from rltrain.config.loader import load_config

    try:
        if name == "run":
            return f"; {way_on(read_config(arguments[0]))}"
        given = parsed(name, arguments)
        return f"; {way_on(load_config(given.config, given.overrides))}"
    except UserError as error:
        return f"; cannot say whether the run can resume: {error}"


if __name__ == "__main__":
    sys.exit(main())
