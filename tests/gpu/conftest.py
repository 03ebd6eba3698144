"""Skips the tests of this folder without a CUDA device, and finds what jobs start from."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.forked.popen import run
from tools.gpu_prepared import START, STARTS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the models and rows made by tools/gpu_check.sh --prepare, or new ones."""
    if os.environ.get(START):
        return Path(os.environ[START])
    folder = tmp_path_factory.mktemp("start")
    for name, command in STARTS.items():
        done = run([sys.executable, *command, "--output", str(folder / name)], 120)
        assert done.returncode == 0, done.stderr
    return folder
