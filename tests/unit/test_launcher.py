"""A process learns that the one which has started it was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.runtime.machine import has_lost_launcher
from tests.forked.popen import PYTHON_PATH

CHILD = """
import os, sys, time
from rltrain.runtime.machine import has_lost_launcher, launcher
launcher()
first = os.getppid()
print("has begun", has_lost_launcher(), flush=True)
deadline = time.monotonic() + 30
while os.getppid() == first and time.monotonic() < deadline:
    time.sleep(0.01)
print("is an orphan", has_lost_launcher(), flush=True)
"""


@pytest.mark.parametrize(("by_torchrun", "learns"), [(True, True), (False, False)])
def test_a_process_whose_launcher_is_killed_learns_it(by_torchrun: bool, learns: bool, tmp_path: Path) -> None:
    """But for one that a shell has started, as by `nohup`, and left behind."""
    (tmp_path / "child.py").write_text(CHILD)
    launcher = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, str(tmp_path / "child.py")],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **({"TORCHELASTIC_RUN_ID": "job"} if by_torchrun else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout as told:
        assert told.readline() == "has begun False\n"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert told.readline() == f"is an orphan {learns}\n"


def test_one_whose_launcher_runs_has_not_lost_it() -> None:
    assert not has_lost_launcher()
