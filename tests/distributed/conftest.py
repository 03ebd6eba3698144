"""Files whose cases are many run them in two worlds of ranks: what the default suite sees, and all the rest."""

from typing import Any

import pytest


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank of the file's `quick_world` reported; for a test that is marked slow itself, of `slow_world`."""
    is_slow = any(mark.name == "slow" for mark in request.node.own_markers)  # not where the whole file is
    return request.getfixturevalue("slow_world" if is_slow else "quick_world")
