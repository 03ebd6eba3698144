"""Writes an import as a config file: every value with the key of the source that it comes from."""

import json
from typing import Any

import yaml

from rltrain.config.schema import Config
from rltrain.importing.translation import Leftover, Setting, Translation, keys_of

WIDTH = 118
ORDER = {name: number for number, name in enumerate(Config.model_fields)}


def written(out: Translation, source: str) -> str:
    """The config file's text."""
    nested: dict[str, Any] = {}
    for path, setting in out.settings.items():
        *sections, name = keys_of(path)
        section = nested
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = setting
    lines = [
        f"# world size: {out.world_size}",
        f"# Imported from {out.framework}: {source}",
        *(f"# {note}" for note in out.notes),
    ]
    for name in sorted(nested, key=lambda key: ORDER.get(key, len(ORDER))):
        lines += _lines(name, nested[name], 0)
    lines += _listed("Not translated, and without influence on what is computed:", out.leftovers)
    lines += _listed("NOT TRANSLATED, ALTHOUGH IT CHANGES WHAT IS COMPUTED:", out.differences)
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, depth: int) -> list[str]:
    key = "  " * depth + (json.dumps(name) if any(char in name for char in ":{}[]#") else name)
    if isinstance(value, Setting):
        text = f"{key}: {scalar(value.value)}"
        comment = f"# {value.origin}"
        return [f"{text}   {comment}"] if len(text) + len(comment) < WIDTH else ["  " * depth + comment, text]
    return [f"{key}:", *(line for inner, one in value.items() for line in _lines(inner, one, depth + 1))]


def scalar(value: Any) -> str:
    """On one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {scalar(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar(one) for one in value) + "]"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return json.dumps(value) if isinstance(value, str) and any(char in text for char in ",{}[]#:") else text


def _listed(title: str, found: list[Leftover]) -> list[str]:
    if not found:
        return []
    return ["", f"# {title}", *(f"#   {one.key}: {scalar(_short(one.value))}   ({one.reason})" for one in found)]


def _short(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= 80 else text[:80] + "..."
