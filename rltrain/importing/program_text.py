"""The text of a program that a source starts, and of its own modules: nothing of it is run."""

import ast
from collections.abc import Iterator
from pathlib import Path


def texts_of(module: str, near: Path) -> Iterator[tuple[str, ast.AST]]:
    """(name, parsed text) of the program `module`, then of the modules of the same tree that it imports.

    Its file is looked for from `near` and its parents. Nothing where there is none.
    """
    file = _file_of(module, near) if module else None
    if file is None:
        return
    tree = file
    for _ in module.split("."):
        tree = tree.parent
    program = _parsed(file)
    yield module, program
    for name in _imports(program):
        imported = _file_of(name, tree)
        if imported is not None:
            yield name, _parsed(imported)


def texts(*nodes: ast.AST | None) -> list[str] | None:
    """What stands there, where all are texts."""
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return found if len(found) == len(nodes) else None


def last_name(node: ast.AST) -> str:
    """Of a dotted name its last part."""
    return ast.unparse(node).rsplit(".", 1)[-1]


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
