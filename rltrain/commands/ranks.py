"""Starts the ranks of a job by torchrun, which tells each of them what it is."""

import argparse
import os
import sys
from collections.abc import Sequence

TORCHRUN = ("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts")
ALONE = ("--dry-run", "-h", "--help")
"""With these a job needs no ranks."""


def wants_ranks(arguments: Sequence[str], *, only_if_asked: bool = False) -> bool:
    """Whether this process is yet to start them; `only_if_asked`: where an option of torchrun's is given."""
    asked = not only_if_asked or any(argument.partition("=")[0] in TORCHRUN for argument in arguments)
    return asked and "RANK" not in os.environ and not {*ALONE} & {*arguments}


def start_ranks(name: str, arguments: Sequence[str]) -> int:
    """Become torchrun, with `rltrain NAME` on every rank: one, unless --nproc-per-node says more. Never returns."""
    command = torchrun_command(name, arguments)
    os.execv(command[0], command)


def torchrun_command(name: str, arguments: Sequence[str]) -> list[str]:
    """torchrun's options among `arguments` are for it; the rest is for every rank."""
    parser = argparse.ArgumentParser(prog=f"rltrain {name}", add_help=False, allow_abbrev=False)
    for option in TORCHRUN:
        parser.add_argument(option)
    given, rest = parser.parse_known_args(arguments)
    options = {option: getattr(given, option[2:].replace("-", "_")) for option in TORCHRUN}
    options["--nproc-per-node"] = options["--nproc-per-node"] or "1"
    alone = all(options[option] is None for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port"))
    spelled = [f"{option}={value}" for option, value in options.items() if value is not None]
    agent = [sys.executable, "-m", "torch.distributed.run", *(["--standalone"] if alone else []), *spelled]
    return [*agent, "-m", "rltrain.commands.main", name, *rest]
