"""torchrun's agent, as `rltrain train` starts it: the last line that it prints is the reason of its end."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rltrain.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USER_ERROR, FAILED = 2, 1
"""Exit statuses: a mistake that the user can mend, anything else."""
SHUTDOWN_TIMEOUT_S = "310"
"""Seconds that ranks have to save after a signal. They end by themselves after checkpoint.stop_within_s."""
RANK_MODULE = "rltrain.commands.main"
"""What ranks run, but for those that rltrain.run starts: they run rltrain.interface."""


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
    from rltrain.command import read_arguments
    from rltrain.interface import read_config

    try:
        return f"; {way_on(read_config(arguments[0]) if name == 'run' else read_arguments(arguments))}"
    except UserError as error:
        return f"; whether it can go on is unknown: {error}"


if __name__ == "__main__":
    sys.exit(main())
