"""The doctor under torchrun, with two agents on one machine as two nodes."""

import socket
from pathlib import Path

from tests.support.torchrun import run_on_two_nodes


def test_one_report_of_two_nodes_names_what_differs(tmp_path: Path) -> None:
    program = ["-m", "rltrain", "doctor", "--mb", "1", "--shared", str(tmp_path)]
    (status, report, _), (other, nothing, _) = run_on_two_nodes(program, environments=({}, {"RLTRAIN_NATIVE": "off"}))
    assert (status, other) == (1, 1)
    assert not nothing, "one report for the job"
    lines = {line[8:].split("  ")[0]: line for line in report.splitlines()}
    host = socket.gethostname()
    wrong = [line for line in report.splitlines() if line.startswith("WRONG") and "/dev/shm" not in line]
    assert len(wrong) == 4 and all("copies of weights" in line for line in wrong), report
    assert any(f"RLTRAIN_NATIVE is off, on node 1 ({host})" in line for line in wrong)
    assert "shared by all 2 nodes" in lines[f"storage, {tmp_path}"]
    assert "GB/s" in lines[f"between nodes 0-1 ({host}, {host})"] and lines["slowest link"].startswith("ok")
    assert lines["clocks"].startswith("ok")
