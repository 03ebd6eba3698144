"""Environments that a program registers with SkyRL-Gym, found in its text: nothing of it is run."""

import ast
from collections.abc import Iterator
from pathlib import Path


def entry_point_of(environment: str, module: str, near: Path) -> str | None:
    """ "module:class" that the program `module`, or a module of the same tree that it imports, registers under this id.

    Its file is looked for from `near` and its parents. None where there is none, or it registers no such id.
    """
    file = _file_of(module, near) if module else None
    if file is None:
        return None
    tree = file
    for _ in module.split("."):
        tree = tree.parent
    program = _parsed(file)
    imported = (_file_of(name, tree) for name in _imports(program))
    for text in (program, *(_parsed(one) for one in imported if one is not None)):
        for identifier, entry_point in _registered(text):
            if identifier == environment:
                return entry_point
    return None


def _file_of(module: str, near: Path) -> Path | None:
    path = Path(*module.split("."))
    for folder in (near.resolve(), *near.resolve().parents):
        for name in (path.with_suffix(".py"), path / "__init__.py"):
            if (folder / name).is_file():
                return folder / name
    return None


def _parsed(file: Path) -> ast.AST:
    """Empty where it is no Python that can be read."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _imports(program: ast.AST) -> Iterator[str]:
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _registered(program: ast.AST) -> Iterator[tuple[str, str]]:
    """(id, entry point) of every call `register(id=..., entry_point=...)` whose arguments are texts."""
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] == "register":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            values = [given.get("id"), given.get("entry_point")]
            texts = [
                value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
            ]
            if len(texts) == len(values):
                yield texts[0], texts[1]
