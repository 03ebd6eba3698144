"""Environments that a program registers with SkyRL-Gym, found in its text."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rltrain.importing.program_text import last_name, texts, texts_of


def entry_point_of(environment: str, module: str, near: Path) -> str | None:
    """ "module:class" that the program `module`, or a module of the same tree that it imports, registers under this id.

    None where there is none, or it registers no such id.
    """
    for _, text in texts_of(module, near):
        for identifier, entry_point in _registered(text):
            if identifier == environment:
                return entry_point
    return None


def _registered(program: ast.AST) -> Iterator[tuple[str, str]]:
    """(id, entry point) of every call `register(id=..., entry_point=...)` whose arguments are texts."""
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and last_name(node.func) == "register":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            found = texts(given.get("id"), given.get("entry_point"))
            if found:
                yield found[0], found[1]
