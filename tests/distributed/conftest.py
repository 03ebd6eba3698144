"""Files whose cases are many run them in two worlds of ranks: what the default suite sees, and all the rest."""

from typing import Any

import pytest


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank of the file's `quick_world` reported; for a test marked slow, every rank of its `slow_world`."""
    is_slow = request.node.get_closest_marker("slow") is not None
    return request.getfixturevalue("slow_world" if is_slow else "quick_world")
