"""Reads configs as Hydra has them: YAML with defaults and interpolations, and overrides `a.b=c`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.loader import PlainLoader
from rltrain.errors import ConfigError

INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
MOST_ROUNDS = 50


def parse_override(text: str) -> tuple[str, Any] | None:
    """(key, value) of `a.b=c`, `+a.b=c`; None where it is no such thing."""
    found = OVERRIDE.fullmatch(text.strip())
    if found is None or found[1] == "~":
        return None
    return found[2], parse_value(found[3])


def parse_value(text: str) -> Any:
    """A list, a mapping, a number, a truth value, null or a text."""
    try:
        value = yaml.load(text, Loader=PlainLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError:
        return text
    return text if value is None and text.strip() not in ("null", "~", "") else value


def flattened(data: Any, prefix: str = "") -> dict[str, Any]:
    """Values under dotted keys. Lists, and mappings without keys, are values."""
    if not isinstance(data, dict) or not data:
        return {prefix: data} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def read_config(
    path: Path, environment: Mapping[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The config of a file and the files that its `defaults` name, under dotted keys, interpolated; and what of these
    was not to be found. ConfigError where the file cannot be read."""
    missing: list[str] = []
    data = _merged(path, path.parent, missing)
    for text in overrides:
        parsed = parse_override(text)
        if parsed is None:
            raise ConfigError(f"{text!r} is no override; expected key=value with a dotted key")
        _put(data, parsed[0].split("."), parsed[1])
    flat = flattened(data)
    return {key: _interpolated(value, key, data, environment) for key, value in flat.items()}, missing


def _merged(path: Path, root: Path, missing: list[str]) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=PlainLoader)  # noqa: S506 (a SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys with values at the top level")
    listed = data.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    own_placed = False
    for entry in listed:
        if entry == "_self_":
            _merge(merged, data)
            own_placed = True
        else:
            _merge(merged, _default(entry, path, root, missing))
    if not own_placed:
        _merge(merged, data)
    return merged


def _default(entry: Any, path: Path, root: Path, missing: list[str]) -> dict[str, Any]:
    """What one entry of a list of defaults stands for."""
    if isinstance(entry, dict):
        group, name = next(iter(entry.items()))
        group = str(group).removeprefix("optional ")
        if group.startswith("override ") or name in (None, "null"):
            return {}
        folder, _, package = group.partition("@")
        file, keys = f"{folder}/{name}", (package or folder).replace("/", ".")
    else:
        file, _, keys = str(entry).partition("@")
    file = file.removesuffix(".yaml")
    found = next((base / f"{file}.yaml" for base in (path.parent, root) if (base / f"{file}.yaml").is_file()), None)
    if found is None:
        missing.append(f"{file}.yaml, a default of {path.name}")
        return {}
    data = _merged(found, root, missing)
    for key in reversed([key for key in keys.split(".") if key and key != "_global_"]):
        data = {key: data}
    return data


def _merge(into: dict[str, Any], data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _put(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[keys[-1]] = value


def _interpolated(value: Any, key: str, data: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_interpolated(one, key, data, environment) for one in value]
    rounds = 0
    while isinstance(value, str) and (found := INTERPOLATION.search(value)):
        rounds += 1
        if rounds > MOST_ROUNDS:
            raise ConfigError(f"{key}: its interpolations stand for one another")
        meant = _meaning(found[1], key, data, environment)
        value = meant if found[0] == value else value.replace(found[0], str(meant), 1)
    return value


def _meaning(expression: str, key: str, data: Any, environment: Mapping[str, str]) -> Any:
    """Of `${...}`. What cannot be told stays, in other brackets."""
    name, is_call, rest = expression.partition(":")
    if not is_call:
        return _at(data, _absolute(name.strip(), key), f"$<{expression}>")
    arguments = [parse_value(part.strip()) for part in rest.split(",")]
    if name == "oc.env":
        return environment.get(str(arguments[0]), arguments[1] if len(arguments) > 1 else f"$<{expression}>")
    if name == "oc.select":
        return _at(data, str(arguments[0]), arguments[1] if len(arguments) > 1 else None)
    numbers = [one for one in arguments if isinstance(one, int | float)]
    if name in ("subtract", "multiply", "int_div", "add") and len(numbers) == len(arguments) == 2:
        first, second = numbers
        results = {"subtract": first - second, "multiply": first * second, "add": first + second}
        return results[name] if name in results else int(first // second) if second else 0
    return f"$<{expression}>"


def _absolute(name: str, key: str) -> str:
    """Of a name with leading dots, which is meant from where it stands."""
    dots = len(name) - len(name.lstrip("."))
    return name if not dots else ".".join([*key.split(".")[:-dots], name.lstrip(".")])


def _at(data: Any, dotted: str, default: Any) -> Any:
    for key in dotted.split("."):
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data
