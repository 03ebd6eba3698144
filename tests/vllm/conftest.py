"""Tests against the real vLLM without a GPU, in the environment given by RLTRAIN_VLLM_PYTHON.

They are collected only if named. `bash tests/run.sh --vllm` does so, and also makes the environment.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import data_overrides, quickstart_files
from tests.support.marks import is_asked_for
from tests.vllm.servers import VLLMServer, write_models

__all__ = ["data_overrides", "quickstart_files"]

FOLDER = Path(__file__).parent
HOW = "bash tests/run.sh --vllm"


def pytest_configure(config: pytest.Config) -> None:
    if is_asked_for(FOLDER, config) and not os.environ.get("RLTRAIN_VLLM_PYTHON"):
        raise pytest.UsageError(f"tests/vllm needs RLTRAIN_VLLM_PYTHON; {HOW} makes that environment and sets it")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if is_asked_for(FOLDER, config) else True


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    return None if is_asked_for(FOLDER, config) else f"tests/vllm was not collected; to run it: {HOW}"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's build for CPUs needs a processor with AVX-512")
    return os.environ["RLTRAIN_VLLM_PYTHON"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two checkpoints of one architecture, with the quickstart's tokenizer."""
    return write_models(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="session")
def server_of_all(
    vllm_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    started = VLLMServer(vllm_python, checkpoints[0], tmp_path_factory.mktemp("server") / "server.log")
    yield started
    started.kill()


@pytest.fixture
def server(server_of_all: VLLMServer) -> VLLMServer:
    """Returns the shared server of all tests, restarted if it has ended. Its weights are those of the last test."""
    server_of_all.ensure()
    return server_of_all
