"""Worlds of ranks that run once per test file, and the reports of their ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import run_distributed

Ranks = list[dict[str, Any]]
"""The report of every rank, by name."""


def made_once(make: Callable[[Path], Any]) -> Any:
    """Returns a fixture with the result of `make` in a new folder, made once per test file."""
    return pytest.fixture(scope="module")(lambda tmp_path_factory: make(tmp_path_factory.mktemp("once")))


def world(case: str, num_ranks: int = 4, timeout_s: float = 300, **arguments: Any) -> Any:
    """Returns a fixture with the reports of `case` of tests/distributed on every rank."""
    return made_once(lambda folder: run_case(case, num_ranks, timeout_s, **arguments))


def run_case(case: str, num_ranks: int = 4, timeout_s: float = 300, **arguments: Any) -> list[Any]:
    """Returns the reports of `case` ("module:function" of tests/distributed) on every rank."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    return run_distributed(f"tests.distributed.{case}", num_ranks, given, timeout_s)


def reports(ranks: Ranks, name: str) -> list[Any]:
    """Returns the reports on `name` of all ranks that took part. Fails if there are none."""
    found = [rank[name] for rank in ranks if rank.get(name) is not None]
    assert found, f"no rank reported {name}"
    return found
