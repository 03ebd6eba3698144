"""The doctor under torchrun: two agents on one machine stand for two nodes."""

import os
import socket
import sys
from pathlib import Path
from subprocess import PIPE

from tests.forked.popen import FORKED_ENVIRONMENT as OF_RANKS
from tests.forked.popen import REPOSITORY, Popen


def start(node: int, port: int, *arguments: str, **environment: str) -> Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "rltrain", "doctor", *arguments]
    return Popen(
        torchrun, cwd=REPOSITORY, env={**os.environ, **OF_RANKS, **environment}, stdout=PIPE, stderr=PIPE, text=True
    )


def test_one_report_of_two_nodes_names_what_differs(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("--mb", "1", "--shared", str(tmp_path))
    nodes = [start(node, port, *arguments, RLTRAIN_NATIVE="auto" if node == 0 else "off") for node in range(2)]
    outputs = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], outputs
    assert not outputs[1][0], "one report for the job"
    lines = {line[8:].split("  ")[0]: line for line in outputs[0][0].splitlines()}
    host = socket.gethostname()
    wrong = [line for line in outputs[0][0].splitlines() if line.startswith("WRONG") and "/dev/shm" not in line]
    assert len(wrong) == 4 and all("copies of weights" in line for line in wrong), outputs[0][0]
    assert any(f"RLTRAIN_NATIVE is off, on node 1 ({host})" in line for line in wrong)
    assert "shared by all 2 nodes" in lines[f"storage, {tmp_path}"]
    assert "GB/s" in lines[f"between nodes 0-1 ({host}, {host})"] and lines["slowest link"].startswith("ok")
    assert lines["clocks"].startswith("ok")
