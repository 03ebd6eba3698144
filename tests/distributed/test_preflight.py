"""Nodes that cannot work together are refused with one message. Two agents on one machine act as the nodes."""

import os
import socket
from pathlib import Path

import pytest

from tests.forked.popen import REPOSITORY
from tests.support.torchrun import run_on_two_nodes

HOST = socket.gethostname()
SECOND, FIRST = f"on node 1 ({HOST})", f"on node 0 ({HOST})"


def refusal(folder: Path, fault: str, *overrides: str, num_ranks: tuple[int, int] = (1, 1), **of_second: str) -> str:
    """Returns the job's output and asserts a single message."""
    config = ["--config", str(REPOSITORY / "configs/quickstart.yaml"), f"output_dir={folder}/out"]
    placed = "placement={'actor, reference': 0, 'rollout, reward': 1}"
    program = ["tests/distributed/cases_preflight.py", *config, "actor.parallel.tp=1", placed, *overrides]
    environments = ({"FAULT": fault}, {"FAULT": fault, "OTHER_FOLDER": str(folder), **of_second})
    outcomes = run_on_two_nodes(program, num_ranks=num_ranks, environments=environments)
    assert all(status != 0 for status, _, _ in outcomes)
    said = "".join(errors for _, _, errors in outcomes)
    assert said.count("\nrltrain: ") == 1, said
    return said.split("\nrltrain: ")[1].split("\n\n")[0]


def test_nodes_that_differ_are_named_with_all_that_differs(tmp_path: Path) -> None:
    said = refusal(tmp_path, "code", num_ranks=(2, 1), OMP_NUM_THREADS="1")
    assert "code of rltrain differs: " in said and f"another {SECOND}" in said
    assert f"number of ranks (torchrun's --nproc-per-node) differs: 2 {FIRST}; 1 {SECOND}" in said


def test_slurms_order_is_to_be_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "1")
    said = refusal(tmp_path, "order", SLURM_NODEID="0")
    assert f"node 0 of torchrun is {HOST}, which is node 1 of Slurm's list" in said and "$SLURM_NODEID" in said


def test_a_checkpoint_that_a_node_does_not_see_and_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    os.symlink(REPOSITORY / "tests/warmed_up", tmp_path / "model")
    relative = os.path.relpath(tmp_path / "model", REPOSITORY)
    said = refusal(tmp_path, "folder", f"model.path={relative}")
    assert f"model.path: {relative} differs: there {FIRST}; missing {SECOND}" in said
    said = refusal(tmp_path, "full disk", f"model.path={relative}")
    assert "output_dir: " in said and "is full" in said and SECOND in said and FIRST not in said
