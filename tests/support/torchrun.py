"""Runs functions and commands on ranks started by torchrun's agents."""

import faulthandler
import importlib
import json
import os
import random
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen, run


def free_port() -> int:
    """Returns a port that nothing listens on.

    It is below those of outgoing connections. So no client of a test beside this one takes it before a server does.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = random.SystemRandom()  # tests seed the other generators
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", ports.randrange(lowest // 2, lowest)))
            return free.getsockname()[1]


def run_on_two_nodes(
    program: Sequence[str],
    *,
    num_ranks: Sequence[int] = (1, 1),
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    timeout_s: float = 100,
) -> list[tuple[int, str, str]]:
    """Runs torchrun's `program` and returns (exit status, standard output, standard error) of each agent."""
    port, agents = free_port(), []
    for node in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        torchrun += [f"--nproc-per-node={num_ranks[node]}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        environment = {**os.environ, **FORKED_ENVIRONMENT, **environments[node]}
        agents.append(
            Popen([*torchrun, *program], cwd=REPOSITORY, env=environment, stdout=PIPE, stderr=PIPE, text=True)
        )
    outputs = [agent.communicate(timeout=timeout_s) for agent in agents]
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def run_distributed(
    case: str, num_ranks: int, arguments: dict[str, Any] | None = None, timeout_s: float = 400
) -> list[Any]:
    """Calls `case` ("module:function") with `arguments` on every rank and returns its JSON results by rank."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [__file__, case, json.dumps(arguments or {}), results]
        done = run(command, timeout_s)
        if done.returncode != 0:
            raise AssertionError(f"{case} failed on {num_ranks} ranks:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _main(case: str, arguments: str, results: str) -> None:
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    module, function = case.split(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    rank = torch.distributed.get_rank()
    Path(results, f"{rank}.json").write_text(json.dumps(value))
    torch.distributed.barrier()
    # Skips teardown: it aborts if a case has left a receive open on purpose.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
