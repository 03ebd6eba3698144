"""Tests on a real Slurm, set up and torn down here: `bash tests/run.sh --slurm`. They are collected only if named."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import data_overrides, quickstart_files, warmed_up
from tests.slurm.cluster import Cluster, obstacle
from tests.support.marks import is_asked_for

__all__ = ["data_overrides", "quickstart_files", "warmed_up"]

FOLDER = Path(__file__).parent
HOW = "bash tests/run.sh --slurm"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if is_asked_for(FOLDER, config) else True


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    return None if is_asked_for(FOLDER, config) else f"tests/slurm was not collected; to run it: {HOW}"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a cluster with two nodes, n1 and n2."""
    if reason := obstacle():
        if os.environ.get("RLTRAIN_SLURM") == "require":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
