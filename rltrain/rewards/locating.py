"""Finds functions ("file.py:function", "module:function", "module.function") and files of commands by their config
names.

Relative paths start at the working directory of the job.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rltrain.errors import ConfigError, nearest

INTERPRETERS = re.compile(r"python[\d.]*|(ba|da|z)?sh")
FORMS = '"file.py:function", "module:function" or "module.function"'


def locate(name: str, config_key: str, *, shown: str | None = None, known: Sequence[str] = ()) -> Callable[..., Any]:
    """Returns the function `name`. `shown` is its name in the config, under `config_key`.

    Imports also search a file's folder, or the working directory for a module. Raises ConfigError if the function does
    not exist or its module cannot be imported. The message lists the names in `known`.
    """
    shown = shown or name
    place, separator, function_name = name.rpartition(":" if ":" in name else ".")
    if not (place and separator and function_name):
        raise unknown_function(shown, config_key, known)
    is_file = place.endswith(".py") and separator == ":"
    module = _load_file(Path(place), shown, config_key) if is_file else _import(place, shown, config_key)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{config_key}: {shown!r}: {place} has no function {function_name!r}")
    found: Callable[..., Any] = function
    return found


def found_command(command: Sequence[str], config_key: str) -> list[str]:
    """Returns the command with absolute paths for its files, so that it can run in another working directory.

    Raises ConfigError if a script of Python or a shell does not exist.
    """
    words = [_found_word(word, number) for number, word in enumerate(command)]
    if INTERPRETERS.fullmatch(Path(words[0]).name):
        script = next((word for word in words[1:] if not word.startswith("-") or word in ("-c", "-m")), "")
        if script.endswith((".py", ".sh")) and not Path(script).is_file():
            raise ConfigError(
                f"{config_key}: got {list(command)}: there is no file {script!r} (relative paths start at {Path.cwd()})"
            )
    return words


def _found_word(word: str, number: int) -> str:
    """Makes a word absolute if it names a file. The first word without a slash is a program in PATH. A later one can be
    a file, but not a folder."""
    path = Path(word).expanduser()
    is_named = path.exists() if "/" in word else number > 0 and path.is_file()
    return os.path.abspath(path) if is_named and not word.startswith("-") else word


def unknown_function(name: str, config_key: str, known: Sequence[str]) -> ConfigError:
    """Returns the error for a name without any of the `FORMS` and outside the built-in names `known`."""
    near = f" (the nearest is {near})" if (near := nearest(name, known)) else ""
    return ConfigError(f"{config_key}: {name!r} is unknown; expected {', '.join([*known, FORMS])}{near}")


def source_file(name: str) -> Path | None:
    """Returns the file of the function `name` without running it. Returns None if there is none, as for a URL or a
    built-in function."""
    place, separator, function_name = name.rpartition(":" if ":" in name else ".")
    if not place or not function_name.isidentifier():
        return None
    if place.endswith(".py") and separator == ":":
        path = Path(place).expanduser().resolve()
        return path if path.is_file() else None
    module = place.replace(".", "/")
    folders = dict.fromkeys([os.getcwd(), *sys.path])
    found = (Path(folder, file) for folder in folders for file in (f"{module}.py", f"{module}/__init__.py"))
    return next((path for path in found if path.is_file()), None)


def _import(module_name: str, shown: str, config_key: str) -> ModuleType:
    _search(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{config_key}: {shown!r}: cannot import {module_name} ({type(error).__name__}: {error}); "
            f"searched in {os.getcwd()} and among the installed packages"
        ) from error


def _load_file(path: Path, shown: str, config_key: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(
            f"{config_key}: {shown!r}: there is no file {str(path)!r} (relative paths start at {Path.cwd()})"
        )
    name = str(path)  # unique, so that it cannot hide a module of the same name
    if name in sys.modules:
        return sys.modules[name]
    _search(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the file ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{config_key}: {shown!r}: cannot run {path} ({type(error).__name__}: {error})") from error
    return module


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
