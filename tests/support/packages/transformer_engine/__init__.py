"""A stand-in for Transformer Engine 2.20 without a GPU: its modules make the same parameters from the same arguments.

Modules missing here can be imported, and their names are classes for subclassing only. Uncut linear layers compute;
other modules of this package do not.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "2.20.2"


class Absent:
    """A class named by megatron-core. rltrain's models must not use it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} of Transformer Engine is not in the stand-in")

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Replaces `apply` of autograd functions."""
        cls()


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = importlib.import_module(f"{self.__name__}.{name}") if name.islower() else type(name, (Absent,), {})
        setattr(self, name, made)
        return made


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules without a file here. It must come last among the finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())

from transformer_engine import common, pytorch  # noqa: E402, F401
