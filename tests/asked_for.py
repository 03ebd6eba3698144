"""Folders of tests that are collected only where pytest is given them by name."""

from pathlib import Path

import pytest


def is_asked_for(folder: Path, config: pytest.Config) -> bool:
    """Whether pytest was given `folder`, or something in it."""
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return any(folder in (path, *path.parents) for path in named)
