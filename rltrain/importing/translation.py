"""What an import makes of a source's keys: values of config keys, and what is left over."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rltrain.config.explain import section_of
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.importing.model_file import overridden_key, says
from rltrain.importing.shell_values import UNKNOWN, shown

PLACEMENT = "placement."


class UntranslatableError(Exception):
    """A value that no value here stands for; the text says why."""


class SourceKeys:
    """The keys that a source gives, with their values. It remembers which were looked at."""

    def __init__(self, values: Mapping[str, Any], folder: Path | None = None) -> None:
        self.folder = folder or Path()
        """Where the source lies; of a command the working directory."""
        self._values = {key: _plain(value) for key, value in values.items()}
        self.unknown = {key for key, value in values.items() if UNKNOWN in str(value)}
        """Whose values only running the source would tell, wholly or in part."""
        self._read: set[str] = set()
        self.last = ""
        """The key that was looked at last."""

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default`, what the source takes where the key is missing."""
        self._read.add(key)
        self.last = key
        return self._values.get(key, default)

    def first(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """The first of `keys` that is given, by its names over time, and its value; the first key where none is."""
        for key in keys:
            if key in self._values:
                self._read.update(keys)
                self.last = key
                return key, self._values[key]
        return keys[0], default

    def under(self, prefix: str) -> dict[str, Any]:
        """What is given below `prefix`, looked at, without the prefix."""
        found = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        self._read.update(found)
        return {key.removeprefix(prefix): value for key, value in found.items()}

    def left(self) -> dict[str, Any]:
        """What nothing has looked at."""
        return {key: value for key, value in self._values.items() if key not in self._read}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Setting:
    value: Any
    origin: str
    """Where it comes from, in words."""


@dataclass(frozen=True)
class Leftover:
    """A key of the source that became nothing, with the reason."""

    key: str
    value: Any
    reason: str


@dataclass
class Translation:
    """`differences` change what is computed; `leftovers` do not."""

    framework: str
    settings: dict[str, Setting] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    differences: list[Leftover] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    world_size: int = 1
    ranks_per_node: int = 8

    def set(self, path: str, value: Any, origin: str) -> None:
        self.settings[path] = Setting(value, origin)

    def place(self, roles: Iterable[str], ranks: str, origin: str) -> None:
        """Roles on the same ranks by one key."""
        named = [*roles]
        for path, setting in list(self.settings.items()):
            if path.startswith(PLACEMENT) and setting.value == ranks:
                del self.settings[path]
                named = [*path.removeprefix(PLACEMENT).split(", "), *named]
                origin = setting.origin if setting.origin == origin else f"{setting.origin}; {origin}"
        self.settings[PLACEMENT + ", ".join(named)] = Setting(ranks, origin)

    def get(self, path: str) -> Any:
        """The value that was set; else the default."""
        return self.settings[path].value if path in self.settings else default_of(path)

    def leave(self, key: str, value: Any, reason: str) -> None:
        self.leftovers.append(Leftover(key, value, reason))

    def differs(self, key: str, value: Any, reason: str) -> None:
        self.differences.append(Leftover(key, value, reason))

    @property
    def data(self) -> dict[str, Any]:
        """As a config file has it."""
        data: dict[str, Any] = {}
        for path, setting in self.settings.items():
            *sections, name = keys_of(path)
            section = data
            for key in sections:
                section = section.setdefault(key, {})
            section[name] = setting.value
        return data


@dataclass(frozen=True)
class Rule:
    """One key of the source that is one key here."""

    key: str
    path: str
    default: Any = None
    """The source's, where the key is missing; None: it then has no meaning."""
    convert: Callable[[Any], Any] = lambda value: value


def apply(rules: Iterable[Rule], keys: SourceKeys, out: Translation) -> None:
    """Set what the rules say: where the source gives the key, or its default is not the one here."""
    for rule in rules:
        given = rule.key in keys
        value = keys.get(rule.key, rule.default)
        if value is None:
            continue
        try:
            converted = rule.convert(value)
        except UntranslatableError as reason:
            out.differs(rule.key, value, str(reason))
            continue
        if given or converted != default_of(rule.path):
            out.set(rule.path, converted, rule.key if given else f"{rule.key}, whose default in {out.framework} it is")


def sort_out(keys: SourceKeys, harmless: Mapping[str, str], out: Translation) -> None:
    """Say of what is left whether it changes results: `harmless` has patterns of keys that do not, with the reason."""
    for key, value in keys.left().items():
        reason = next((reason for pattern, reason in harmless.items() if fnmatchcase(key, pattern)), None)
        if reason is not None:
            out.leave(key, value, reason)
        elif value not in (None, False, "False", "false", "null", "None", "none", [], {}):
            sort_out_override(key, value, out)


def sort_out_override(key: str, value: Any, out: Translation) -> None:
    """Say that nothing is set by `key`: what overrides config.json has to be written there, and may be already."""
    overridden = overridden_key(key)
    if overridden is None:
        out.differs(key, value, "nothing here stands for it")
    elif says(out.get("model.path"), overridden, value):
        out.leave(key, value, "config.json of model.path says the same")
    else:
        out.differs(
            key, value, f"expected {'.'.join(overridden)} in config.json of model.path, which every part of a run reads"
        )


def keys_of(path: str) -> tuple[str, ...]:
    """The keys of a dotted path; those of `placement` may hold anything."""
    if path.startswith(PLACEMENT):
        return ("placement", path.removeprefix(PLACEMENT))
    return tuple(path.split("."))


def default_of(path: str) -> Any:
    """What a config key is where it is not given; None where it has to be, or is a part of an optional section."""
    section: Any = Config
    value: Any = None
    for name in path.split("."):
        found = getattr(section, "model_fields", {}).get(name)
        if found is None:
            return None
        value = None if found.is_required() else found.get_default(call_default_factory=True)
        section = section_of(found.annotation)
    return value


def refuse_differences(out: Translation) -> None:
    """ConfigError with all that would silently change what is computed."""
    if not out.differences:
        return
    found = "\n".join(f"  {one.key}: {one.value!r}: {one.reason}" for one in out.differences)
    raise ConfigError(
        f"{len(out.differences)} keys of {out.framework} change what is computed and have no counterpart:\n{found}\n"
        "Take them out of the source if you can do without; --allow-differences imports the rest"
    )
