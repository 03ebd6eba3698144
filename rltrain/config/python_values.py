"""Values of a config that is made in Python, as a file would have them: functions and classes become their names."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rltrain.errors import ConfigError


def plain(value: Any, key: str) -> Any:
    """`value` of the dotted `key` without Python objects, down to its leaves. ConfigError for a function that has no
    name by which another process finds it."""
    if isinstance(value, Mapping):
        return {name: plain(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{key}.{index}") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and not isinstance(value, BaseModel):
        return name_of(value, key)
    return value


def name_of(function: Callable[..., Any], key: str) -> str:
    """ "module:function", or "file.py:function" where the file is the script itself or lies outside the working
    directory. Workers find it by that name, in processes of their own."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module_name is None or name is None:
        raise _refused(function, key, "it is an object without a name")
    if name == "<lambda>":
        raise _refused(function, key, "a lambda has no name")
    if "<locals>" in name:
        raise _refused(function, key, "it is defined inside another function")
    module = sys.modules.get(module_name)
    if getattr(module, name, None) is not function:
        raise _refused(function, key, f"{module_name} has not this object under the name {name}")
    file = getattr(module, "__file__", None)
    if module_name == "__main__" and (file is None or not file.endswith(".py")):
        raise _refused(function, key, "it is defined in no file")
    if module_name == "__main__" or ("." not in module_name and not _is_found(module_name, file)):
        return f"{Path(str(file)).resolve()}:{name}"
    return f"{module_name}:{name}"


def _is_found(module_name: str, file: str | None) -> bool:
    """Whether a process that starts in this working directory imports the module by its name."""
    return file is None or not file.endswith(".py") or Path(file).resolve().parent == Path.cwd()


def _refused(function: object, key: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{key}: got {function!r}, but {reason}; expected a function or class at the top level of a module, by whose "
        'name other processes find it, or that name: "file.py:function" or "module:function"'
    )
