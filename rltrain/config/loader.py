"""Reads a config file with overrides into the schema, or lists its mistakes with their place and a correction."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rltrain.config.explain import all_keys, choices, expectation, section_of
from rltrain.config.foreign import known_elsewhere
from rltrain.config.schema import Config
from rltrain.config.section import split_roles
from rltrain.errors import ConfigError, nearest, one_of

# The source of config values: a YAML file with known lines, and overrides on top of it.

KeyPath = tuple[str | int, ...]
"""Keys (and list indices) from the top of the config down to a value."""

MERGE_KEY = "<<"
PLACEMENT = "placement"
OVERRIDE = "override"
PLAIN_COLLECTIONS = (yaml.resolver.Resolver.DEFAULT_MAPPING_TAG, yaml.resolver.Resolver.DEFAULT_SEQUENCE_TAG)


class PlainLoader(yaml.SafeLoader):
    """A safe YAML loader with common number formats only. 1e-3 is a number, while 1:30, 010 and 2026-11-21 are text."""


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


@dataclass
class Source:
    """Plain config data with the origin of each path: "FILE:LINE" or the text of an override."""

    data: dict[str, Any]
    name: str
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Returns the origin of the value at `path`, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.name

    def override(self, text: str) -> None:
        """Applies an override of the form `a.b.c=value`.

        `placement.ROLE` moves only that role, even if it shares a comma-joined key. null removes the role. Raises
        ConfigError if the text has another form, or if a key on the path is a value and not a section.
        """
        origin = f"{OVERRIDE} {text!r}"
        key, separator, value_text = text.partition("=")
        keys = tuple(part.strip() for part in key.split("."))
        if not separator or not all(keys):
            raise ConfigError(f"{origin}: expected key=value with a dotted key, such as actor.parallel.tp=2")
        value, _ = _read_yaml(value_text, origin)
        self.assign(".".join(keys), value, origin)

    def assign(self, key: str, value: Any, origin: str) -> None:
        """Sets the value at a dotted key, as `override` does from a text."""
        keys = tuple(key.split("."))
        section = self._section(keys[:-1], origin)
        if keys[:-1] == (PLACEMENT,):
            self._unplace(section, split_roles(keys[-1]))
            if value is None:
                return
        for path in [path for path in self.origins if path[: len(keys)] == keys]:
            del self.origins[path]
        section[keys[-1]] = value
        self.origins[keys] = origin

    def _section(self, keys: tuple[str, ...], origin: str) -> dict[str, Any]:
        """Returns the mapping at `keys`. Creates it if the file has none."""
        section = self.data
        for depth, key in enumerate(keys, start=1):
            if section.get(key) is None:
                section[key] = {}
                self.origins[keys[:depth]] = origin
            if not isinstance(section[key], dict):
                raise ConfigError(f"{origin}: {'.'.join(keys[:depth])} is a value, not a section with keys")
            section = section[key]
        return section

    def _unplace(self, section: dict[str, Any], roles: Sequence[str]) -> None:
        """Removes `roles` from the keys of `placement`. Other roles of the same key stay where they are."""
        for key in list(section):
            remaining = ",".join(role for role in split_roles(key) if role not in roles)
            if remaining == ",".join(split_roles(key)) or (remaining != key and remaining in section):
                continue
            value, origin = section.pop(key), self.origins.pop((PLACEMENT, key), self.name)
            if remaining:
                section[remaining], self.origins[PLACEMENT, remaining] = value, origin


def read_source(path: Path) -> Source:
    """Returns the data of a YAML file. Raises ConfigError with file and line if it cannot be read or has a key
    twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: the config file does not exist; expected a YAML file (--config)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the config file cannot be read as text: {error}") from error
    data, origins = _read_yaml(text, str(path))
    if not isinstance(data, dict):
        given = "an empty file" if data is None else type(data).__name__
        raise ConfigError(f"{path}: got {given}; expected keys with values at the top level, such as steps: 100")
    return Source(data, str(path), origins)


def _read_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, str]]:
    try:
        reader = _Reader(text, name)
        data = reader.read()
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(_describe_yaml_error(error, name)) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: values are nested too deeply; expected a config") from error
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return data, reader.origins


class _Reader:
    """Turns the YAML node tree into plain data. Notes the line of every value and every repeated key."""

    def __init__(self, text: str, name: str) -> None:
        self.loader = PlainLoader(text)
        self.name = name
        self.origins: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self.open_nodes: list[yaml.Node] = []
        self.flattened: set[int] = set()

    def read(self) -> Any:
        node = self.loader.get_single_node()
        return None if node is None else self._value(node, ())

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is parent for parent in self.open_nodes):
            raise yaml.MarkedYAMLError(problem="an alias that contains itself", problem_mark=node.start_mark)
        if isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN_COLLECTIONS:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag}", problem_mark=node.start_mark)
        self.open_nodes.append(node)
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            value = [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            value = self.loader.construct_object(node)
        self.open_nodes.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        if id(node) not in self.flattened:
            self._note_repeated_keys(node, path)
            self.loader.flatten_mapping(node)
            self.flattened.add(id(node))
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self.origins[*path, key] = f"{self.name}:{key_node.start_mark.line + 1}"
            data[key] = self._value(value_node, (*path, key))
        return data

    def _note_repeated_keys(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in first_lines and key != MERGE_KEY:
                dotted = ".".join(map(str, (*path, key)))
                self.problems.append(
                    f"{self.name}:{line}: {dotted}: the key is given twice, first in line {first_lines[key]}"
                )
            first_lines.setdefault(key, line)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=node.start_mark)
        return str(node.value)


def _describe_yaml_error(error: yaml.YAMLError | ValueError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark and not name.startswith(OVERRIDE) else name
    parts = [getattr(error, part, None) for part in ("context", "problem")]
    return f"{where}: not valid YAML: {', '.join(filter(None, parts)) or str(error).splitlines()[0]}"


# Names in config files of earlier versions. The replacement is a key, or a value for a name of the form key=value.

RENAMED = {
    "loss.importance_cap": "loss.correction.high",
    "loss.tis_clip": "loss.correction.high",
    "critic.critic_only_steps": "critic.critic_warmup_steps",
    "weight_sync.transport=golden": "full_gather",
}
REMOVED = {
    "model.logits_chunk_tokens": "logits are always computed for some tokens and columns at a time",
    "data.min_prompt_tokens": "leave rows with short prompts out of the files",
    "reward.warn_flat_steps": "the warning comes after 5 such steps",
    "timeouts.report_s": "waits are reported every 30 s",
}
"""Keys of earlier versions without a successor, each with its substitute."""


# Values that an import left open.

HOLE = "???"
"""Value of a key that `import-config --allow-holes` left open. Hydra marks missing values alike."""
OPEN = ("env.function", "reward.function", "data.train.path")
"""Keys that an import may leave open."""


def _refuse_holes(source: Source) -> None:
    """Raises ConfigError with all keys that are still open."""
    problems = []
    for key in OPEN:
        value: Any = source.data
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value == HOLE:
            origin = source.origin(tuple(key.split(".")))
            problems.append(
                f"{origin}: {key}: got {HOLE}, a hole that import-config left open; expected what the file's first "
                "comments describe (docs/importing.md)"
            )
    if problems:
        raise ConfigError("\n".join(problems))


# Validation against the schema, and messages about mistakes.

MAX_VALUE_CHARS = 80
TEXT = "text"
UNKNOWN_KEY, MISSING_KEY = "extra_forbidden", "missing"


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of a YAML file with the `a.b.c=value` overrides applied in order. Values are parsed as YAML.

    Raises ConfigError with all mistakes. Each has FILE:LINE or the override, the dotted key, the given value and the
    expected one. Combinations of keys are checked by `rltrain.planning.validation`.
    """
    source = read_source(path)
    for override in overrides:
        source.override(override)
    return validated(source)


def validated(source: Source) -> Config:
    """Returns the config of `source`. Raises ConfigError in the same way as `load_config`."""
    _refuse_holes(source)
    try:
        return Config.model_validate(source.data)
    except ValidationError as error:
        problems = _problems(error.errors(include_url=False), source)
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise ConfigError(f"{source.name}: {len(problems)} mistakes:\n" + "\n".join(f"  {problem}" for problem in problems))


def _problems(errors: Sequence[ErrorDetails], source: Source) -> list[str]:
    """Returns one line per key. A key that matches none of several types is reported once."""
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
        return f"got {_show(value)}; the value is now called {new_value}"
    expected = expectation(path)
    hint = " in quotes" if expected == TEXT and isinstance(value, int | float) else ""
    if isinstance(value, str) and (near := nearest(value, choices(path))):
        hint = f" (the nearest is {near})"
    if value is None and _is_entry(path):
        hint = '. Inside braces a key with a comma needs quotes: {"actor, rollout": 0}'
    return f"got {_show(value)}; expected {expected}{hint}"


def _suggestion(path: KeyPath, value: Any) -> str:
    """Returns a suggestion for an unknown key.

    It is the new name of a renamed key, the substitute of a removed key, or else our name of another trainer's key.
    Then follow the nearest key in the same section and a key of the same name in another section.
    """
    new_key, substitute = RENAMED.get(_dotted(path)), REMOVED.get(_dotted(path))
    if new_key is not None:
        return f"the key is now {new_key}"
    if substitute is not None:
        return f"the key was removed: {substitute}"
    ours = [f"for {name} use {key}" for name, key in known_elsewhere(_dotted(path), value)]
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
    """Returns whether `path` is an entry of a mapping with keys chosen by the user, such as `placement`."""
    *above, mapping, _ = ("", "", *path)
    field = _section_at(tuple(above[2:])).model_fields.get(str(mapping))
    return field is not None and get_origin(field.annotation) is dict


def _given_part(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """Returns the beginning of `location` up to the last key in the data. Validation adds further parts."""
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
