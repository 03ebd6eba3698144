"""Fixtures for files with many cases: they run in two worlds of ranks, one for the default suite, one for the rest."""

from typing import Any

import pytest


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the reports of the file's `quick_world`, or of `slow_world` for a test that is itself marked slow."""
    is_slow = any(mark.name == "slow" for mark in request.node.own_markers)  # a mark of the whole file does not count
    return request.getfixturevalue("slow_world" if is_slow else "quick_world")
