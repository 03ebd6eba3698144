"""Makes docs/config.md and the JSON schema of config files from the sections and their docstrings."""

import argparse
import ast
import functools
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rltrain.config.explain import expectation, section_of
from rltrain.config.foreign import table
from rltrain.config.schema import Config

SCHEMA_COMMAND = "Prints the JSON schema of config files, for editors."
COMMAND = "python -m rltrain.config.key_reference > docs/config.md"
HEAD = """\
# Config reference

This page lists every key of a config file. Keys are nested in a file and dotted on the command line:
`actor.optimizer.lr=1e-5`. `[]` marks an element of a list. `python launch/train.py --config FILE --dry-run` checks all
keys together. If a combination is not allowed, it prints the reason and the nearest allowed choice.
"""


NAMES_ELSEWHERE = (
    "## Names in other trainers",
    "",
    "Users of other trainers often write these keys from habit. rltrain refuses them and names the key to use. To",
    "convert a whole config or script use `rltrain import-config`. The pages on coming from other trainers have its",
    "tables.",
    "",
)


@functools.cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring below each attribute of a section class. Inherited attributes are included."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for attribute, below in zip(body, body[1:], strict=False):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                text = _constant_text(below)
                if text is not None:
                    found[attribute.target.id] = _one_line(text)
    return found


def document() -> str:
    """Returns the text of docs/config.md."""
    own = [name for name, field in Config.model_fields.items() if section_of(field.annotation) is None]
    explained: dict[type[BaseModel], str] = {}
    parts = [HEAD, "## The job", "", *_table(_rows(Config, "", (), own, explained)), ""]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            about = docstrings(Config).get(name) or _one_line(section.__doc__ or "")
            rows = _rows(section, f"{name}.", (name,), list(section.model_fields), explained)
            parts += [f"## {name}", "", *([_cell(about), ""] if about else []), *_table(rows), ""]
    return "\n".join([*parts, *NAMES_ELSEWHERE, *table(), "", f"Made by `{COMMAND}`."])


def _rows(
    section: type[BaseModel],
    prefix: str,
    path: tuple[str | int, ...],
    names: list[str],
    explained: dict[type[BaseModel], str],
) -> Iterator[str]:
    """Yields a line of the table for each key in `names`. A section comes before its keys.

    The keys of a section used by several keys are listed once, below the first of them.
    """
    for name in names:
        field = section.model_fields[name]
        key, inner, own_path = f"{prefix}{name}", section_of(field.annotation), (*path, name)
        about = docstrings(section).get(name) or (_one_line(inner.__doc__ or "") if inner else "")
        if inner is None:
            yield _row(key, expectation(own_path), field, about)
            continue
        takes = expectation(own_path).replace(" with the keys ", "\n").split("\n")[0]
        is_list = takes.startswith("a list of")
        first = explained.setdefault(inner, key)
        like = f" Its keys are those of `{first}`." if first != key else ""
        yield _row(key, takes, field, f"{about}{like}".strip())
        if not like:
            inside, element = (f"{key}[].", (*own_path, 0)) if is_list else (f"{key}.", own_path)
            yield from _rows(inner, inside, element, list(inner.model_fields), explained)


def _row(key: str, takes: str, field: FieldInfo, about: str) -> str:
    return f"| `{key}` | {_cell(takes)} | {_default(field)} | {_cell(about)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, float) and value == int(value):
        return f"`{value:g}`"
    return f"`{json.dumps(value, default=str)}`"


def _table(rows: Iterator[str]) -> list[str]:
    return ["| key | takes | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _constant_text(statement: ast.stmt) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# The JSON schema.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sets the description of the command. It has no arguments."""
    parser.description = SCHEMA_COMMAND


def run(arguments: argparse.Namespace) -> int:
    """Prints the JSON schema. Returns the exit status, always 0."""
    print(text(), end="")
    return 0


def text() -> str:
    """Returns the text of configs/schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema, with the docstring of every key as its description."""
    schema = Config.model_json_schema()
    schema["title"] = "rltrain"
    definitions = schema.get("$defs", {})
    for section in sections_of(Config):
        own = schema if section is Config else definitions.get(section.__name__, {})
        for key, words in docstrings(section).items():
            if key in own.get("properties", {}):
                own["properties"][key]["description"] = words
    return schema


def sections_of(section: type[BaseModel]) -> list[type[BaseModel]]:
    """Returns `section` and all sections inside it, each once."""
    found = [section]
    for one in found:
        inner = [section_of(field.annotation) for field in one.model_fields.values()]
        found += [other for other in inner if other is not None and other not in found]
    return found


if __name__ == "__main__":
    print(document())
