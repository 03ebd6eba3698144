"""Which of a test's cases belong to the default suite."""

from collections.abc import Iterable

import pytest


def slow_but(cases: Iterable[object], *quick: object) -> list[object]:
    """Cases of which some alone belong to the default suite."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
