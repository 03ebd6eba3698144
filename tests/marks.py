"""Which of a test's cases belong to the default suite."""

from collections.abc import Iterable

import pytest


def slow_but(cases: Iterable[object], *quick: object) -> list[object]:
    """Cases of which some alone belong to the default suite; a tuple is several arguments."""
    return [case if case in quick else pytest.param(*_arguments(case), marks=pytest.mark.slow) for case in cases]


def _arguments(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
