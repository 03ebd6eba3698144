"""The doctor under torchrun, with two agents on one machine as two nodes."""

import socket
from pathlib import Path

from tests.support.http_servers import StandInServer
from tests.support.torchrun import run_on_two_nodes


def test_one_report_of_two_nodes_names_what_differs(tmp_path: Path) -> None:
    server = StandInServer("sglang")
    config = ["--config", "configs/quickstart.yaml", "rollout.engine=http", f"rollout.urls=[{server.url}]"]
    program = ["-m", "rltrain", "doctor", "--mb", "1", "--shared", str(tmp_path), *config]
    (status, report, _), (other, nothing, _) = run_on_two_nodes(program, environments=({}, {"RLTRAIN_NATIVE": "off"}))
    assert (status, other) == (1, 1)
    assert not nothing, "one report for the job"
    lines = {line[8:].split("  ")[0]: line for line in report.splitlines()}
    host = socket.gethostname()
    wrong = [line for line in report.splitlines() if line.startswith("WRONG") and "/dev/shm" not in line]
    of_server = wrong.pop(next(number for number, line in enumerate(wrong) if server.url in line))
    assert "rollout.http.token_env or token_file names its token" in of_server, "both nodes say the same, once"
    server.die()
    assert len(wrong) == 4 and all("copies of weights" in line for line in wrong), report
    assert any(f"RLTRAIN_NATIVE is off, on node 1 ({host})" in line for line in wrong)
    assert "shared by all 2 nodes" in lines[f"storage, {tmp_path}"]
    assert "GB/s" in lines[f"between nodes 0-1 ({host}, {host})"] and lines["slowest link"].startswith("ok")
    assert lines["clocks"].startswith("ok")
