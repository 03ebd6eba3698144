"""Starts the ranks of a job by torchrun, and prints the reason as the last line when they end."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rltrain.errors import FAILED, USER_ERROR, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


# Starts the ranks of a job by torchrun, which tells each of them what it is.

TORCHRUN = (
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
)
MEETING = TORCHRUN[1:5] + TORCHRUN[6:]
"""Those by which nodes find each other."""
MOST_WORLDS = 64
"""That are tried, of those that a range of nodes allows."""

Given = Mapping[str, str | None]
"""torchrun's options, with what was given."""


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Adds torchrun's options to the help of a command whose ranks `rltrain` starts, which takes them from there."""
    ranks = parser.add_argument_group(
        "ranks",
        "rltrain starts torchrun, and gives it these options and --node-rank, --master-addr,\n--master-port, "
        "--max-restarts and --rdzv-*.",
        argument_default=argparse.SUPPRESS,
    )
    ranks.add_argument("--nproc-per-node", metavar="N", help="ranks on each node (default 1)")
    ranks.add_argument("--nnodes", metavar="N", help="nodes, or a range such as 2:4 (default 1)")


def torchrun_options(arguments: Sequence[str]) -> tuple[Given, list[str]]:
    """torchrun's options among `arguments`, spelt with dashes or underscores, and the rest, which is for every rank."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in TORCHRUN:
        parser.add_argument(option, "--" + option[2:].replace("-", "_"), dest=option)
    given, rest = parser.parse_known_args(arguments)
    return vars(given), rest


def possible_worlds(given: Given, environment: Mapping[str, str]) -> list[tuple[int, int]]:
    """(number of ranks, ranks of a node) of every world that torchrun may make, the largest first. Empty where only
    torchrun can tell, as with --nproc-per-node gpu. UserError for what it would refuse."""
    fewest, most = _range_of("--nnodes", given["--nnodes"] or environment.get("PET_NNODES", "1"))
    per_node = given["--nproc-per-node"] or "1"
    if per_node in ("gpu", "auto") or most - fewest >= MOST_WORLDS:
        return []
    ranks = (os.cpu_count() or 1) if per_node == "cpu" else _count("--nproc-per-node", per_node, ", gpu, cpu or auto")
    return [(nodes * ranks, ranks) for nodes in range(most, fewest - 1, -1)]


def set_world(dry_run: argparse.Namespace, given: Given, environment: Mapping[str, str]) -> None:
    """Gives a dry run the world that torchrun's options describe.

    UserError where only torchrun can tell the world, or where --world-size names another one.
    """
    worlds = possible_worlds(given, environment)
    if not worlds:
        raise UserError(
            f"--nproc-per-node: got {given['--nproc-per-node']} with --dry-run, which asks no machine; expected the "
            "number of ranks on each node"
        )
    world_size, ranks_per_node = worlds[0]
    if (asked := vars(dry_run).setdefault("world_size", world_size)) != world_size:
        raise UserError(
            f"--world-size: got {asked}, but --nproc-per-node and --nnodes make {world_size} ranks; expected one "
            "of the two"
        )
    vars(dry_run).setdefault("ranks_per_node", ranks_per_node)


def has_torchrun() -> bool:
    """Whether torch is installed, which is not imported for that."""
    return importlib.util.find_spec("torch") is not None


def start_ranks(name: str, arguments: Sequence[str]) -> int:
    """Become torchrun, with `rltrain NAME` on every rank: one, unless --nproc-per-node says more. Never returns."""
    if not has_torchrun():
        raise ModuleNotFoundError("No module named 'torch'")
    command = torchrun_command(name, arguments)
    os.execv(command[0], command)


def torchrun_command(name: str, arguments: Sequence[str]) -> list[str]:
    """torchrun's options among `arguments` are for it; the rest is for every rank."""
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


# torchrun's agent, as `rltrain train` starts it: the last line that it prints is the reason of its end.

SHUTDOWN_TIMEOUT_S = "310"
"""Seconds that ranks have to save after a signal. They end by themselves after checkpoint.stop_within_s."""
RANK_MODULE = "rltrain.cli.main"
"""What ranks run, but for those that rltrain.run starts: they run rltrain.cli.python_interface."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs torchrun with `arguments`. Returns 0, 128 and the number of the signal that ended it, or the status of the
    rank that failed: 2 for a mistake the user can mend, 1 for anything else."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = [*(sys.argv[1:] if arguments is None else arguments)]
    module, *rest = given[given.index("-m") + 1 :]
    name, *rest = rest if module == RANK_MODULE else ("run", *rest)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_TIMEOUT_S)
    try:
        torchrun.run(torchrun.parse_args(given))
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
    """Returns the first failure of a rank that has left a message, or else the first one."""
    told = {rank: failure for rank, failure in failures.items() if isinstance(failure.message, dict)}
    return min((told or failures).items(), key=lambda item: item[1].timestamp)


def _reason(rank: int, failure: "ProcessFailure") -> str:
    """Returns in one line why a rank has failed."""
    if isinstance(failure.message, dict):
        return " ".join(line.strip() for line in failure.message["message"].splitlines() if line.strip())
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}, as for want of memory, or crashed"
    return f"rank {rank} ended with exit status {failure.exitcode} without a message; its output is above"


def _way_on(name: str, arguments: Sequence[str]) -> str:
    """Returns how a run that was interrupted goes on."""
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
        return f"; whether it can go on is unknown: {error}"


if __name__ == "__main__":
    sys.exit(main())
