"""NCCL's groups on one GPU: made anew, and destroyed after the graphs that hold them."""

import os
import subprocess
import sys

import pytest

from tests.support.jobs import REPOSITORY

pytestmark = pytest.mark.gpu


def test_groups_are_made_anew_after_what_is_recorded_of_them_is_forgotten() -> None:
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.gpu.group_cases"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
