"""Two torchrun agents on one machine stand for two nodes: node ranks place roles, and rank order is node order."""

import os
import socket
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

from tests.end_to_end.jobs import REPOSITORY
from tests.forked.popen import PYTHON_PATH, Popen


def start_node(node: int, port: int, arguments: list[str]) -> Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=2", "launch/train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
    return Popen(
        [*torchrun, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
    )


def test_a_job_over_two_nodes_finishes(quickstart_files: Path, data_overrides: list[str], tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "--config=configs/quickstart.yaml",
        f"model.path={quickstart_files}/model",
        f"output_dir={tmp_path}",
        *data_overrides,
        "placement={'actor, reference': 'node:0', 'rollout, reward': 'node:1'}",
        "steps=2",
        "batch.prompts_per_step=4",
        "data.eval.max_rows=8",
        "data.train.max_rows=1024",
    ]
    nodes = [start_node(node, port, arguments) for node in range(2)]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert "step 2/2" in outputs[0]
    assert (tmp_path / "hf/config.json").exists()
