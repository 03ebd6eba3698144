"""The supported frameworks, and functions to read the keys of a source."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.loader import PlainLoader
from rltrain.errors import ConfigError
from rltrain.import_config import rlinf, skyrl, slime, slime_learning, verl, verl_trees
from rltrain.import_config.influence import settle
from rltrain.import_config.shell_script import ScriptReading, StartedCommand, read_script, read_text
from rltrain.import_config.translation import (
    NO_TREE,
    NOTHING,
    PLACEMENT,
    RUNNING,
    RowCounts,
    SourceKeys,
    Translation,
    Tree,
    UntranslatableError,
    flattened,
    roles_of,
)

# Hydra configs: YAML with defaults and interpolations, and overrides `a.b=c`.

INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
MOST_ROUNDS = 50


def parse_override(text: str) -> tuple[str, Any] | None:
    """Returns (key, value) of `a.b=c` or `+a.b=c`. None for any other text."""
    found = OVERRIDE.fullmatch(text.strip())
    if found is None or found[1] == "~":
        return None
    return found[2], parse_value(found[3])


def parse_value(text: str) -> Any:
    """Returns the text as a list, mapping with braces, number, truth value or null if it is one, as Hydra does."""
    try:
        value = yaml.load(text, Loader=PlainLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError:
        return text
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text
    return text if value is None and text.strip() not in ("null", "~", "") else value


def read_config(
    path: Path, environment: Mapping[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Reads a config file with the files of its `defaults`. Returns interpolated values under dotted keys, and the
    missing files. Raises ConfigError if the file cannot be read."""
    missing: list[str] = []
    data = _merged(path, path.parent, missing)
    for text in overrides:
        parsed = parse_override(text)
        if parsed is None:
            raise ConfigError(f"{text!r} is not an override; expected key=value with a dotted key")
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
    """Returns the data of one entry in a list of defaults."""
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
            raise ConfigError(f"{key}: its interpolations refer to each other")
        meant = _meaning(found[1], key, data, environment)
        value = meant if found[0] == value else value.replace(found[0], str(meant), 1)
    return value


def _meaning(expression: str, key: str, data: Any, environment: Mapping[str, str]) -> Any:
    """Returns the value of `${...}`. An unknown value stays as text in other brackets."""
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
    """Returns the absolute name of a relative one. Leading dots are relative to `key`."""
    dots = len(name) - len(name.lstrip("."))
    return name if not dots else ".".join([*key.split(".")[:-dots], name.lstrip(".")])


def _at(data: Any, dotted: str, default: Any) -> Any:
    for key in dotted.split("."):
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


# Steps with fewer prompts than the source has replicas or engines. The source divides samples, while rltrain keeps the
# samples of a prompt together.

OF_PROMPTS = ("env", "reward")
"""Roles that divide a step's prompts over their ranks. Each rank needs a prompt."""


def widen(out: Translation) -> None:
    """Widens replicas and engines until each has a prompt. The actor splits sequences over more ranks. Results stay the
    same except for rounding."""
    prompts = out.get("batch.prompts_per_step")
    of_mini_batch = max(prompts // out.get("batch.mini_batches"), 1)
    sizes = {key: out.get(f"actor.parallel.{key}") for key in ("tp", "pp", "cp")}
    if out.get("actor.backend") != "fsdp":
        _widen(out, "actor", sizes["tp"] * sizes["pp"] * sizes["cp"], "cp", sizes["cp"], of_mini_batch)
    tp = out.get("rollout.parallel.tp")
    _widen(out, "rollout", tp, "tp", tp, prompts)


def _widen(out: Translation, role: str, ranks_each: int, key: str, size: int, prompts: int) -> None:
    """Increases `key` of a role's parallel sizes from `size` until each replica of `ranks_each` ranks has a prompt."""
    replicas = out.num_ranks(role) // ranks_each
    if replicas <= prompts:
        return
    factor = next(by for by in range(1, replicas + 1) if replicas % by == 0 and replicas // by <= prompts)
    path = f"{role}.parallel.{key}"
    out.set(path, size * factor, f"{prompts} prompts are too few for {replicas} replicas or engines")
    out.notes.append(
        f"{path} is {size * factor} instead of {size}: {prompts} prompts are too few for {replicas} replicas or "
        "engines, as the samples of a prompt stay together here"
    )


def limit(out: Translation) -> None:
    """Places environments and rewards on at most as many ranks as there are prompts."""
    prompts = out.get("batch.prompts_per_step")
    for path, setting in list(out.settings.items()):
        placed = roles_of(path) if path.startswith(PLACEMENT) else []
        limited = [role for role in placed if role in OF_PROMPTS]
        number = out.num_ranks(limited[0]) if limited else 0
        if number <= prompts:
            continue
        first = int(str(setting.value).partition("-")[0])
        leaders = [*range(first, first + number, out.get("rollout.parallel.tp"))]
        chosen = leaders if len(leaders) <= prompts else [*range(first, first + prompts)]
        del out.settings[path]
        if others := [role for role in placed if role not in OF_PROMPTS]:
            out.set(f"{PLACEMENT}{', '.join(others)}", setting.value, setting.origin)
        out.set(f"{PLACEMENT}{', '.join(limited)}", ",".join(map(str, chosen)), f"at most {prompts} ranks")


@dataclass(frozen=True)
class Framework:
    """A supported framework. `arguments` extracts the launch arguments from the words of a command, or returns None for
    other commands."""

    name: str
    arguments: Callable[[Sequence[str]], Sequence[str] | None]
    keys: Callable[[Sequence[str]], dict[str, Any]]
    translate: Callable[[SourceKeys, Translation, RowCounts], None]
    marks: Sequence[str]
    """Beginnings of modules, keys or flags that only this framework has."""
    beside: Callable[[Sequence[Sequence[str]]], dict[str, Any]] | None = None
    """Returns keys from all commands of a script, in addition to the arguments of the training."""
    tree: Callable[[Path, Mapping[str, Any]], Tree] = lambda _folder, _keys: NO_TREE
    """Returns what a tree of the framework beside a source with these keys has of its own."""

    def mark_in(self, words: Sequence[str]) -> str | None:
        """Returns the first word of a command, or key of a file, with a mark of this framework."""
        return next((word for word in map(_bare, words) if word.startswith(tuple(self.marks))), None)


@dataclass(frozen=True)
class ReadSource:
    """The keys of a source, with notes about the reading."""

    keys: dict[str, Any]
    name: str
    notes: list[str]
    folder: Path = field(default_factory=Path)
    unset: frozenset[str] = frozenset()
    """Variables of the script without a value."""
    tree: Tree = NO_TREE


def _bare(word: str) -> str:
    """Returns a module by its import name, even if it is given as a file. Values of overrides and options are
    removed."""
    name = word.removeprefix("-m ").strip().lstrip("+").partition("=")[0]
    if not name.endswith(".py"):
        return name
    parts = Path(name).with_suffix("").parts
    tops = (len(parts) - 1 - parts[::-1].index(top) for top in ("verl", "rlinf", "recipe") if top in parts[:-1])
    return ".".join(parts[max(tops, default=0) :])


def _after_program(programs: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str] | None]:
    def arguments(words: Sequence[str]) -> Sequence[str] | None:
        for number, word in enumerate(words):
            if word.rsplit("/", 1)[-1] in programs:
                return [word.rsplit("/", 1)[-1], *words[number + 1 :]]
        return None

    return arguments


def _with_overrides(sections: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str] | None]:
    """Returns a function accepting commands with at least two overrides in `sections`."""

    def arguments(words: Sequence[str]) -> Sequence[str] | None:
        found = [word for word in words if (parsed := parse_override(word)) and parsed[0].split(".")[0] in sections]
        return words if len(found) > 1 else None

    return arguments


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Returns overrides by their keys, and options by their names with dashes."""
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


def _with_program(words: Sequence[str]) -> dict[str, Any]:
    """Returns `_overrides`, with a program given as a file like one given as a module. Folders before a trainer's own
    package are left out."""
    files = [word for word in words if word.endswith(".py") and "=" not in word and not word.startswith("-")]
    return ({"-m": _bare(files[0]).lstrip("./")} if files else {}) | _overrides(words)


OPTIONS = {
    "-m": "-m",
    "--config-name": "--config-name",
    "--config-path": "--config-path",
    "--nproc_per_node": "--nproc-per-node",
    "--nproc-per-node": "--nproc-per-node",
    "--nnodes": "--nnodes",
}
WITHOUT_DOTS = r"[a-z][a-z_]+"
"""Pattern of a key at the first level. Variables set by a command are in capitals."""


def _slime_keys(words: Sequence[str]) -> dict[str, Any]:
    program = words[0].rsplit("/", 1)[-1] if words and not words[0].startswith("--") else slime_learning.PROGRAMS[0]
    return {**slime.parse_flags(words), slime_learning.PROGRAM: program}


FRAMEWORKS = {
    "slime": Framework(
        *("slime", _after_program(slime_learning.PROGRAMS), _slime_keys, slime.translate),
        marks=("--hf-checkpoint", "--prompt-data", "--rollout-batch-size", "--actor-num-nodes"),
        beside=slime_learning.beside_training,
    ),
    "verl": Framework(
        *("verl", _with_overrides(verl.SECTIONS), _with_program, verl.translate),
        marks=("verl.", "actor_rollout_ref."),
        tree=verl_trees.tree_beside,
    ),
    "skyrl": Framework(
        *("SkyRL", _with_overrides(skyrl.SECTIONS), _with_program, skyrl.translate),
        marks=("skyrl.", "skyrl_train.", "trainer.policy.", "trainer.algorithm.", "trainer.placement.", "generator."),
    ),
    "rlinf": Framework(
        *("RLinf", _with_overrides(rlinf.SECTIONS), _overrides, rlinf.translate),
        marks=("rlinf.", "cluster.", "runner."),
    ),
}


def framework_of(given: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns the name in FRAMEWORKS of the framework of a file or a command. Raises ConfigError without marks of
    exactly one framework."""
    path = Path(given[0])
    if _is_config(path):
        commands: list[Sequence[str]] = [[*read_config(path, environment, given[1:])[0]]]
    else:
        commands = [one.arguments for one in _script(given, environment)[1].started]
    found: dict[str, str] = {}
    for words in commands:
        found |= {name: mark for name, one in FRAMEWORKS.items() if (mark := one.mark_in(words)) and name not in found}
    if len(found) == 1:
        return next(iter(found))
    marks = found or {name: " or ".join(one.marks) for name, one in FRAMEWORKS.items()}
    choices = ", ".join(f"--from {name} ({mark})" for name, mark in marks.items())
    reason = "it has keys of several" if found else "it has keys of none"
    raise ConfigError(f"{_name(given)}: the trainer is not clear, as {reason}; expected one of {choices}")


def _is_config(path: Path) -> bool:
    """Returns whether a source is a YAML file, and not a command that ends with one."""
    return path.suffix in (".yaml", ".yml") and len(str(path).split()) == 1


def read(framework: Framework, given: Sequence[str], environment: Mapping[str, str]) -> ReadSource:
    """Returns the keys of a file or a command. Raises ConfigError if it has no keys of the framework."""
    path = Path(given[0])
    if _is_config(path):
        values, missing = read_config(path, environment, given[1:])
        notes = [f"not found and left out: {one}" for one in missing]
        return ReadSource(values, str(path), notes, path.parent, tree=framework.tree(path.parent, values))
    name, script = _script(given, environment)
    launches = [(one, found) for one in script.started if (found := framework.arguments(one.arguments)) is not None]
    if not launches:
        hint = "; expected such a command, a script that starts one, or a YAML file"
        other = _another(framework, [one.arguments for one in script.started])
        raise ConfigError(f"{name}: starts no command of {framework.name}{other}{hint}{asked_for(script.unset)}")
    _refuse_missing_script(launches[0][0].arguments, name)
    notes = [*script.assumed]
    if len(launches) > 1:
        notes.append(f"the script starts {len(launches)} trainings, this is the first ({_lines(launches)})")
    folder = path.parent if path.is_file() else Path()
    keys = _with_config(framework.keys(launches[0][1]), launches[0][1], folder, environment, notes)
    if framework.beside is not None:
        keys |= framework.beside([one.arguments for one in script.started])
    return ReadSource(keys, name, notes, folder, frozenset(script.unset), framework.tree(folder, keys))


def _refuse_missing_script(words: Sequence[str], name: str) -> None:
    """Raises ConfigError for a command that starts another script. One that exists has been read instead."""
    for shell, script in zip(words, words[1:], strict=False):
        if shell in ("bash", "sh") and script.endswith(".sh"):
            raise ConfigError(
                f"{name}: it starts the script {script}, which is not found, and the keys of that one count; expected "
                "it there, or the variables of its path by --env NAME=VALUE"
            )


def asked_for(unset: Iterable[str]) -> str:
    """Returns the hint about variables without a value. Empty without any."""
    names = sorted(name for name in unset if not name.isdigit())
    if not names:
        return ""
    return f". Variables without a value: {', '.join(names)}; give those that count by --env NAME=VALUE"


def _another(framework: Framework, commands: Sequence[Sequence[str]]) -> str:
    """Returns a hint if the commands have marks of another framework."""
    for words in commands:
        for name, one in FRAMEWORKS.items():
            if one is not framework and (mark := one.mark_in(words)):
                return f". It starts one of {one.name} ({mark}): expected --from {name}"
    return ""


OWN_CONFIGS = re.compile(
    r"(\w+_)?(ppo|sft|dapo|fapo|spo|retool)(_megatron)?_trainer(_engine)?|ppo_base_config|sft_base_config"
)
"""Names of the trainers' own config files, whose values are the defaults of the rules."""


def _with_config(
    keys: dict[str, Any], words: Sequence[str], folder: Path, environment: Mapping[str, str], notes: list[str]
) -> dict[str, Any]:
    """Adds the keys of the config file that a command names for Hydra. Raises ConfigError if it is not found."""
    name = str(keys.get("--config-name", "")).removesuffix(".yaml")
    if not name or "=" in name:
        return keys
    given = Path(str(keys.get("--config-path", "config")))
    near = folder.resolve()
    ends = [Path(*given.parts[start:], f"{name}.yaml") for start in range(len(given.parts))]
    found = next((base / end for base in (near, *near.parents) for end in ends if (base / end).is_file()), None)
    if OWN_CONFIGS.fullmatch(name) and (found is None or found.parts[-3:-1] == ("trainer", "config")):
        return keys
    if found is None:
        raise ConfigError(
            f"--config-name {name}: {given}/{name}.yaml is not found beside the script, and its keys count; expected "
            "the file there, or as the source, with the overrides after it"
        )
    values, missing = read_config(found, environment, [word for word in words if parse_override(word) is not None])
    notes.append(f"the keys of {found.name}, named by --config-name, are part of the import")
    notes += [f"not found and left out: {one}" for one in missing if not OWN_CONFIGS.match(one)]
    return {**values, **keys}


def _script(given: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ScriptReading]:
    """Returns the name of a script or a command in messages, and its started commands."""
    path = Path(given[0])
    if path.is_file():
        return _name(given), read_script(path, given[1:], environment)
    return _name(given), read_text(given[0] if len(given) == 1 else shlex.join(given), "command", (), environment)


def _name(given: Sequence[str]) -> str:
    return given[0] if Path(given[0]).is_file() else "a command"


def _lines(launches: Sequence[tuple[StartedCommand, object]]) -> str:
    return "lines " + ", ".join(str(started.line) for started, _ in launches)


def translated(
    framework: Framework, source: ReadSource, rows: RowCounts, fixed: Mapping[str, Any] | None = None
) -> Translation:
    """Translates a source, and settles every key of it. `fixed` are the user's own values of config keys.

    Raises ConfigError if its own framework or rltrain would refuse it.
    """
    rows, fixed = replace(rows, counted={}), fixed or {}
    keys, out = _translated_once(framework, source.keys, source, rows, fixed)
    for key, value in keys.used().items():
        if key in out.listed:
            continue
        others = {name: one for name, one in source.keys.items() if name != key}
        with suppress(ConfigError):  # without the key the source is refused, so the key counts
            if _translated_once(framework, others, source, rows, fixed)[1].meaning == out.meaning:
                settle(key, value, out, keys)
    for key in sorted(keys.unknown - out.listed):
        out.notes.append(f"{key}: a part of its value is only known by running the source")
    out.notes[:0] = source.notes
    return out


def _translated_once(
    framework: Framework,
    given: Mapping[str, Any],
    source: ReadSource,
    rows: RowCounts,
    fixed: Mapping[str, Any],
) -> tuple[SourceKeys, Translation]:
    out, keys = Translation(framework.name, fixed=fixed), SourceKeys(given, source.folder)
    keys.tree = source.tree
    try:
        framework.translate(keys, out, rows)
        widen(out)
        limit(out)
    except UntranslatableError as reason:
        unknown = [key for key in keys.used() if key in keys.unknown]
        is_unknown = RUNNING in str(reason) and unknown
        key = unknown[-1] if is_unknown and keys.last not in unknown else keys.last
        value = keys.get(key)
        asked = asked_for(source.unset) if value in NOTHING or key in unknown else ""
        asked += f"; {'or ' if asked else ''}give it by --key {key}=VALUE" if is_unknown else ""
        raise ConfigError(f"{source.name}: {reason} (at {key}: {value!r}){asked}") from None
    return keys, out
