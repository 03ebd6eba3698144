"""The frameworks that configs are imported from, and how the keys of each are read."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.errors import ConfigError
from rltrain.importing import rlinf, skyrl, slime, slime_learning, verl
from rltrain.importing.few_prompts import limit, widen
from rltrain.importing.hydra import flattened, parse_override, read_config
from rltrain.importing.shell_script import Started, read_script, read_text
from rltrain.importing.shell_values import UNKNOWN
from rltrain.importing.slime_commands import beside_training
from rltrain.importing.steps import Rows
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError


@dataclass(frozen=True)
class Framework:
    """`arguments` finds those of a launch among a command's words; None where it is no launch."""

    name: str
    arguments: Callable[[Sequence[str]], Sequence[str] | None]
    keys: Callable[[Sequence[str]], dict[str, Any]]
    translate: Callable[[SourceKeys, Translation, Rows], None]
    beside: Callable[[Sequence[Sequence[str]]], dict[str, Any]] | None = None
    """Keys that stand for what all of a script's commands say beside the training's arguments."""


@dataclass(frozen=True)
class ReadSource:
    keys: dict[str, Any]
    name: str
    notes: list[str]
    folder: Path = field(default_factory=Path)


def _after_program(programs: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str] | None]:
    def arguments(words: Sequence[str]) -> Sequence[str] | None:
        for number, word in enumerate(words):
            if word.rsplit("/", 1)[-1] in programs:
                return [word.rsplit("/", 1)[-1], *words[number + 1 :]]
        return None

    return arguments


def _with_overrides(sections: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str] | None]:
    """A command counts some of whose arguments are overrides of these sections."""

    def arguments(words: Sequence[str]) -> Sequence[str] | None:
        found = [word for word in words if (parsed := parse_override(word)) and parsed[0].split(".")[0] in sections]
        return words if len(found) > 1 else None

    return arguments


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Overrides by their keys, options by their names with dashes."""
    keys: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, separator, value = word.partition("=")
        if word.startswith("-m "):
            keys["-m"] = word.removeprefix("-m ").strip()
        elif name in OPTIONS:
            keys[OPTIONS[name]] = value if separator else following
        elif "==" in word.split(".")[0]:  # a package's version
            continue
        elif (parsed := parse_override(word)) and ("." in parsed[0] or re.fullmatch(WITHOUT_DOTS, parsed[0])):
            keys |= flattened(parsed[1], parsed[0]) if isinstance(parsed[1], dict) else {parsed[0]: parsed[1]}
    return keys


OPTIONS = {
    "-m": "-m",
    "--config-name": "--config-name",
    "--config-path": "--config-path",
    "--nproc_per_node": "--nproc-per-node",
    "--nproc-per-node": "--nproc-per-node",
    "--nnodes": "--nnodes",
}
WITHOUT_DOTS = r"[a-z][a-z_]+"
"""A key of the first level; a variable that a command sets has capitals."""


def _slime_keys(words: Sequence[str]) -> dict[str, Any]:
    program = words[0].rsplit("/", 1)[-1] if words and not words[0].startswith("--") else slime_learning.PROGRAMS[0]
    return {**slime.parse_flags(words), slime_learning.PROGRAM: program}


FRAMEWORKS = {
    "slime": Framework("slime", _after_program(slime_learning.PROGRAMS), _slime_keys, slime.translate, beside_training),
    "verl": Framework("verl", _with_overrides(verl.SECTIONS), _overrides, verl.translate),
    "skyrl": Framework("SkyRL", _with_overrides(skyrl.SECTIONS), _overrides, skyrl.translate),
    "rlinf": Framework("RLinf", _with_overrides(rlinf.SECTIONS), _overrides, rlinf.translate),
}


def read(framework: Framework, given: Sequence[str], environment: Mapping[str, str]) -> ReadSource:
    """The keys of a file or a command. ConfigError where none of the framework's are found."""
    path = Path(given[0])
    if path.suffix in (".yaml", ".yml"):
        values, missing = read_config(path, environment, given[1:])
        return ReadSource(values, str(path), [f"not found, and left out: {one}" for one in missing], path.parent)
    folder = Path()
    if path.is_file():
        folder = path.parent
        script = read_script(path, given[1:], environment)
        name = str(path)
    else:
        text = given[0] if len(given) == 1 else shlex.join(given)
        script = read_text(text, "command", (), environment)
        name = "a command"
    launches = [(one, found) for one in script.started if (found := framework.arguments(one.arguments)) is not None]
    if not launches:
        unset = f" Variables without a value: {', '.join(sorted(script.unset))}" if script.unset else ""
        hint = f"; expected a command of {framework.name}, a script that starts one, or its YAML file.{unset}"
        raise ConfigError(f"{name}: starts nothing that is known as {framework.name}{hint}")
    notes = [*script.assumed]
    if len(launches) > 1:
        notes.append(f"it starts {len(launches)} trainings, of which the first is this ({_lines(launches)})")
    keys = framework.keys(launches[0][1])
    if framework.beside is not None:
        keys |= framework.beside([one.arguments for one in script.started])
    return ReadSource(keys, name, notes, folder)


def _lines(launches: Sequence[tuple[Started, object]]) -> str:
    return "lines " + ", ".join(str(started.line) for started, _ in launches)


def translated(framework: Framework, source: ReadSource, rows: Rows) -> Translation:
    """ConfigError where the source asks for what its own framework, or this one, refuses."""
    out = Translation(framework.name)
    out.notes += source.notes
    keys = SourceKeys(source.keys, source.folder)
    try:
        framework.translate(keys, out, rows)
        widen(out)
        limit(out)
    except UntranslatableError as reason:
        raise ConfigError(f"{source.name}: {reason} (at {keys.last}: {source.keys.get(keys.last)!r})") from None
    for key in sorted(keys.unknown):
        if UNKNOWN in str(source.keys[key]) and key not in [one.key for one in (*out.leftovers, *out.differences)]:
            out.notes.append(f"{key}: a part of its value is told by running the source alone")
    return out
