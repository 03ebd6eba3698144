"""A process learns that the one which has started it was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rltrain.system.processes import has_lost_launcher
from tests.forked.popen import PYTHON_PATH

CHILD = """
import sys, time
from rltrain.system.processes import has_lost_launcher, launcher
launcher()
print("has begun", has_lost_launcher(), flush=True)
deadline = time.monotonic() + 30
while not has_lost_launcher() and time.monotonic() < deadline:
    time.sleep(0.01)
print("is an orphan", has_lost_launcher(), flush=True)
"""


def test_a_process_whose_launcher_is_killed_learns_it(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    launcher = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, str(tmp_path / "child.py")],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout as told:
        assert told.readline() == "has begun False\n"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert told.readline() == "is an orphan True\n"


def test_one_whose_launcher_runs_has_not_lost_it() -> None:
    assert not has_lost_launcher()
