"""Worlds of ranks that run once for a whole file of tests, and what their ranks reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import run_distributed

Ranks = list[dict[str, Any]]
"""What every rank reported, by name."""


def made_once(make: Callable[[Path], Any]) -> Any:
    """Returns a fixture with what `make` makes in a new folder, once for a file of tests."""
    return pytest.fixture(scope="module")(lambda tmp_path_factory: make(tmp_path_factory.mktemp("once")))


def world(case: str, num_ranks: int = 4, timeout_s: float = 300, **arguments: Any) -> Any:
    """Returns a fixture with what `case` of tests/distributed reports on every rank."""
    return made_once(lambda folder: run_case(case, num_ranks, timeout_s, **arguments))


def run_case(case: str, num_ranks: int = 4, timeout_s: float = 300, **arguments: Any) -> list[Any]:
    """Returns what `case` ("module:function" of tests/distributed) reports on every rank."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    return run_distributed(f"tests.distributed.{case}", num_ranks, given, timeout_s)


def reports(ranks: Ranks, name: str) -> list[Any]:
    """Returns what the ranks reported that took part in `name`, of which there must be some."""
    found = [rank[name] for rank in ranks if rank.get(name) is not None]
    assert found, f"no rank reported {name}"
    return found
