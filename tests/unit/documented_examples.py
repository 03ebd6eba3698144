"""Reads the examples that README.md, CONTRIBUTING.md and docs/ show in blocks: configs, programs and rows."""

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.config.schema import Config
from tests.unit.documented_commands import PAGES, REPOSITORY

BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w/.]+\.(?:py|jsonl|json|yaml|sh))`")
SPAN = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"(\w+)(?:(?:\.\w+)+(?:: |=)|: \{)(?!\.\.\.)")
Values = dict[str, Any]

BASE: Values = {"steps": 10, "model": {"path": "model"}, "data": {"train": {"path": "rows.jsonl"}}}
PLACEMENTS: tuple[Values, ...] = (
    {"actor, reference": "0-3", "rollout, reward": "4-7"},
    {"actor, reference, rollout, reward": "all"},
    {"actor": "all"},
)
"""What a page's config leaves to its reader, who places roles in one of these ways where the page places none."""
WHOLE = ("placement", "train")
"""Sections that are not merged."""


@dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    text: str
    before: str
    """The last lines that stand before it."""

    @property
    def title(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """Returns the name of the file that it is, as the paragraph before it says."""
        names = NAMED.findall(self.before)
        return names[-1] if names and names[-1].endswith(SUFFIXES[self.language]) else None


SUFFIXES = {"python": (".py",), "json": (".json", ".jsonl"), "yaml": (".yaml",)}


def examples_of(page: Path) -> list[Example]:
    """Returns every block of a page."""
    text, name = page.read_text(), page.relative_to(REPOSITORY).as_posix()
    found = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip("\n").rpartition("\n\n")[2]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Example(name, line, match[1], match[2], before))
    return found


EXAMPLES = [example for page in PAGES for example in examples_of(page)]


def settings_of(page: Path) -> list[tuple[str, str]]:
    """Returns the settings that a page's sentences quote, each with the page: `a.b: value`, `a.b=value`, `a: {...}`."""
    spans = [span.replace("\n", " ") for span in SPAN.findall(BLOCK.sub("", page.read_text()))]
    sections = Config.model_fields.keys()
    name = page.relative_to(REPOSITORY).as_posix()
    return [(name, span) for span in spans if (found := SETTING.match(span)) and found[1] in sections]


def overrides_of(setting: str) -> list[str]:
    """Returns the setting as a command takes it."""
    key, separator, value = setting.partition(": ")
    return [f"{key}={value}"] if separator and "=" not in key else shlex.split(setting)


def of_language(language: str) -> list[Example]:
    return [example for example in EXAMPLES if example.language == language]


def before_on_its_page(example: Example) -> list[Example]:
    """Returns the earlier blocks of its page."""
    return [other for other in EXAMPLES if other.page == example.page and other.line < example.line]


def merged(base: Values, own: Values) -> Values:
    """Returns `base` with the keys of `own`."""
    made = dict(base)
    for key, value in own.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in WHOLE
        made[key] = merged(base[key], value) if nested else value
    return made


def configs_of(example: Example, read: Callable[[str], Values]) -> Iterator[Values]:
    """Yields what readers make of a config: the block alone, with one block of those before it, and with all of them,
    beside what pages leave out. `read` reads YAML."""
    earlier = [read(other.text) for other in before_on_its_page(example) if other.language == "yaml"]
    together = functools.reduce(merged, earlier, Values())
    for before in ({}, *earlier, together):
        own = merged(merged({"data": {"train": {}}}, before), read(example.text))
        own["data"]["train"] = own["data"]["train"] or BASE["data"]["train"]
        for placement in [own["placement"]] if "placement" in own else PLACEMENTS:
            yield merged({**BASE, "placement": placement}, own)


def write_files(page: str, folder: Path) -> None:
    """Writes the files that the page shows."""
    for other in EXAMPLES:
        if other.page == page and other.language in SUFFIXES and other.file is not None:
            path = folder / other.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(other.text)
