"""Stands in for Transformer Engine 2.20 where there is no GPU: which parameters its modules make of which arguments.

Modules of it that are not here exist when they are imported; what is taken from them are classes that can be derived
from, and nothing else. Linear layers compute where they are not cut; no other module here does.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "2.20.2"


class Absent:
    """What megatron-core names and a model of ours must not use."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} of Transformer Engine is not in the stand-in")

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Of autograd's functions."""
        cls()


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = importlib.import_module(f"{self.__name__}.{name}") if name.islower() else type(name, (Absent,), {})
        setattr(self, name, made)
        return made


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that it is asked for what has no file here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())

from transformer_engine import common, pytorch  # noqa: E402, F401
