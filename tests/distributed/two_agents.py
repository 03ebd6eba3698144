"""Two torchrun agents on one machine that stand for two nodes."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from subprocess import PIPE

from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen


def run_on_two_nodes(
    program: Sequence[str],
    *,
    num_ranks: Sequence[int] = (1, 1),
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    timeout_s: float = 100,
) -> list[tuple[int, str, str]]:
    """(exit status, standard output, standard error) of each agent; `program` is what torchrun starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        torchrun += [f"--nproc-per-node={num_ranks[node]}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        environment = {**os.environ, **FORKED_ENVIRONMENT, **environments[node]}
        agents.append(
            Popen([*torchrun, *program], cwd=REPOSITORY, env=environment, stdout=PIPE, stderr=PIPE, text=True)
        )
    outputs = [agent.communicate(timeout=timeout_s) for agent in agents]
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]
