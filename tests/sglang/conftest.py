"""Tests against the real SGLang, in the environment given by RLTRAIN_SGLANG_PYTHON.

They are collected only if named. `bash tests/run.sh --sglang` does so, and also makes the environment.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rltrain.rollout.servers.sglang_process import Server, server_environment
from tests.end_to_end.conftest import data_overrides, quickstart_files, warmed_up
from tests.forked.popen import forks
from tests.sglang.forked_python import forked_python
from tests.sglang.servers import FROM_DISK, running, server_spec
from tests.support.marks import is_asked_for
from tests.support.rollout_models import write_checkpoint

__all__ = ["data_overrides", "quickstart_files", "warmed_up"]

FOLDER = Path(__file__).parent
HOW = "bash tests/run.sh --sglang"


def pytest_configure(config: pytest.Config) -> None:
    if is_asked_for(FOLDER, config) and not os.environ.get("RLTRAIN_SGLANG_PYTHON"):
        raise pytest.UsageError(f"tests/sglang needs RLTRAIN_SGLANG_PYTHON; {HOW} makes that environment and sets it")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if is_asked_for(FOLDER, config) else True


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    return None if is_asked_for(FOLDER, config) else f"tests/sglang was not collected; to run it: {HOW}"


@pytest.fixture(scope="session")
def real_sglang_python() -> str:
    return os.environ["RLTRAIN_SGLANG_PYTHON"]


@pytest.fixture(scope="session")
def sglang_python(real_sglang_python: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns a Python whose servers are forks of one process, unless forking is off."""
    if not forks():
        yield real_sglang_python
        return
    folder = tmp_path_factory.mktemp("python")
    spec = server_spec(real_sglang_python, checkpoint, folder / "engine.log")
    with forked_python(real_sglang_python, server_environment(spec), folder) as python:
        yield python


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny Qwen3 with one clearly best token at every position."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def start_server(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Returns start_server(model_path, **fields of ServerSpec). It starts a ready server, ended after the module's
    tests."""
    numbers = itertools.count()
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as started:

        def start(model_path: str | Path, **overrides: Any) -> Server:
            server = Server(server_spec(sglang_python, model_path, folder / f"{next(numbers)}.log", **overrides))
            started.callback(server.kill)
            return running(server)

        yield start


@pytest.fixture(scope="session")
def server_of_all(sglang_python: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    server = Server(server_spec(sglang_python, checkpoint, log, args=FROM_DISK))
    yield server
    server.kill()


@pytest.fixture
def server(server_of_all: Server) -> Server:
    """Returns the shared server of all tests, started with `checkpoint` from disk and restarted if it has ended.

    Its weights are those of the last test.
    """
    return running(server_of_all)
