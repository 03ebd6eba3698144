"""Reinforcement-learning post-training of language models as one torchrun job. docs/python.md describes these names."""

import importlib
from typing import TYPE_CHECKING, Any

from rltrain.errors import UserError

if TYPE_CHECKING:
    from rltrain.cli.python_interface import Config, dry_run, run
    from rltrain.runtime.placement import Placement

__all__ = ["Config", "Placement", "UserError", "dry_run", "run"]

_WHERE = {
    "Config": "rltrain.cli.python_interface",
    "Placement": "rltrain.runtime.placement",
    "dry_run": "rltrain.cli.python_interface",
    "run": "rltrain.cli.python_interface",
}
"""The module of each public name. It is imported at the first use of the name."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
