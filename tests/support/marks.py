"""Marks slow cases and decides about collected folders."""

from collections.abc import Iterable
from pathlib import Path

import pytest


def slow_but(cases: Iterable[object], *quick: object) -> list[object]:
    """Returns the cases and marks them slow, except `quick`. A tuple is several arguments."""
    return [case if case in quick else pytest.param(*_arguments(case), marks=pytest.mark.slow) for case in cases]


def _arguments(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)


def is_asked_for(folder: Path, config: pytest.Config) -> bool:
    """Returns whether pytest was called with `folder` or something in it."""
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return any(folder in (path, *path.parents) for path in named)
