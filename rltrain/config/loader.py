"""Reads a config file with overrides into the schema, or says what is wrong with it, where, and what to write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rltrain.config.explain import all_keys, choices, expectation, section_of
from rltrain.config.foreign import known_elsewhere
from rltrain.config.renamed import RENAMED
from rltrain.config.schema import Config
from rltrain.config.source import KeyPath, Source, read_source
from rltrain.errors import ConfigError, nearest, one_of

MAX_VALUE_CHARS = 80
TEXT = "text"
UNKNOWN_KEY, MISSING_KEY = "extra_forbidden", "missing"


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file with `a.b.c=value` overrides applied in order; values are parsed as YAML.

    ConfigError lists every mistake with FILE:LINE or the override, the dotted key, the value given and what was
    expected. What spans several keys is checked by `rltrain.legality`.
    """
    source = read_source(path)
    for override in overrides:
        source.override(override)
    return validated(source)


def validated(source: Source) -> Config:
    """The config of `source`; ConfigError as `load_config` raises it."""
    try:
        return Config.model_validate(source.data)
    except ValidationError as error:
        problems = _problems(error.errors(include_url=False), source)
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise ConfigError(f"{source.name}: {len(problems)} mistakes:\n" + "\n".join(f"  {problem}" for problem in problems))


def _problems(errors: Sequence[ErrorDetails], source: Source) -> list[str]:
    """One line per key: a key that fits none of several types is reported once."""
    problems: dict[KeyPath, str] = {}
    for error in errors:
        missing = error["type"] == MISSING_KEY
        path = error["loc"] if missing else _given_part(error["loc"], source.data)
        if path not in problems:
            problems[path] = f"{source.origin(path)}: {_dotted(path)}: {_describe(error, path, source)}"
    return list(problems.values())


def _describe(error: ErrorDetails, path: KeyPath, source: Source) -> str:
    if error["type"] == MISSING_KEY:
        return f"the key is required and missing; expected {expectation(path)}"
    value = _value_at(source.data, path)
    if error["type"] == UNKNOWN_KEY:
        return f"unknown key (value {_show(value)}); {_suggestion(path, value)}"
    new_value = RENAMED.get(f"{_dotted(path)}={value}")
    if new_value is not None:
        return f"got {_show(value)}, which is now {new_value}"
    expected = expectation(path)
    hint = " in quotes" if expected == TEXT and isinstance(value, int | float) else ""
    if isinstance(value, str) and (near := nearest(value, choices(path))):
        hint = f" (the nearest is {near})"
    if value is None and _is_entry(path):
        hint = '. Inside braces a key with a comma needs quotes: {"actor, rollout": 0}'
    return f"got {_show(value)}; expected {expected}{hint}"


def _suggestion(path: KeyPath, value: Any) -> str:
    """The new name of a renamed key, ours for another trainer's, the nearest key of the same section, or else the key
    of that name elsewhere."""
    new_key = RENAMED.get(_dotted(path))
    if new_key is not None:
        return f"the key is now {new_key}"
    ours = [f"{name} is here {key}" for name, key in known_elsewhere(_dotted(path), value)]
    if ours:
        return "; ".join(ours)
    parent, name = path[:-1], str(path[-1])
    siblings = list(_section_at(parent).model_fields)
    prefix = "".join(f"{key}." for key in parent)
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == name]
    sibling = nearest(name, siblings)
    if sibling is not None:
        return f"the nearest valid key is {prefix}{sibling}"
    if elsewhere:
        return f"the nearest valid key is {nearest(prefix + name, elsewhere) or elsewhere[0]}"
    return f"expected {one_of(name, siblings, where='docs/config.md')}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _section_at(path: KeyPath) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for key in path:
        if isinstance(key, str):  # and no number in a list of sections
            section = section_of(section.model_fields[key].annotation) or section
    return section


def _is_entry(path: KeyPath) -> bool:
    """Whether `path` is an entry of a mapping whose keys users choose, such as `placement`."""
    *above, mapping, _ = ("", "", *path)
    field = _section_at(tuple(above[2:])).model_fields.get(str(mapping))
    return field is not None and get_origin(field.annotation) is dict


def _given_part(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """`location` without what the validation adds to it behind the last key that the data has."""
    for length, key in enumerate(location):
        inside = isinstance(data, dict) and key in data
        if not inside and not (isinstance(data, list) and isinstance(key, int) and key < len(data)):
            return location[:length]
        data = data[key]
    return location


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _show(value: Any) -> str:
    shown = json.dumps(value, default=str, ensure_ascii=False)
    return shown if len(shown) <= MAX_VALUE_CHARS else shown[:MAX_VALUE_CHARS] + "..."
