"""What a job would do. Callable as `rltrain.dry_run(config, world_size=8)`: see `rltrain.interface.dry_run`.

`from rltrain import dry_run` gives this package, whatever was imported before, so the package is what can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _DryRun(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> str:
        told: str = importlib.import_module("rltrain.interface").dry_run(*arguments, **options)
        return told


sys.modules[__name__].__class__ = _DryRun
