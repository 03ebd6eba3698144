"""Losses and advantages that a program registers with SkyRL, found in its text."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rltrain.importing.program_text import last_name, texts, texts_of

LOSSES = ("PolicyLossRegistry", "register_policy_loss")
ADVANTAGES = ("AdvantageEstimatorRegistry", "register_advantage_estimator")
"""The class whose method `register` does it, and the decorator."""


def function_of(name: str, registry: tuple[str, str], module: str, near: Path) -> str | None:
    """ "module:function" that the program `module`, or a module of the same tree that it imports, registers under this
    name. None where there is none, or it registers no such name."""
    for found_in, text in texts_of(module, near):
        for registered, function in _registered(text, *registry):
            if registered == name:
                return f"{found_in}:{function}"
    return None


def _registered(program: ast.AST, registry: str, decorator: str) -> Iterator[tuple[str, str]]:
    """(name, function) of every `registry.register("name", function)`, and of functions under `@decorator("name")`."""
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register":
            named = texts(*node.args[:1])
            if last_name(node.func.value) == registry and named and len(node.args) > 1:
                function = node.args[1]
                if isinstance(function, ast.Name):
                    yield named[0], function.id
        elif isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and last_name(call.func) == decorator:
                    yield from ((named, node.name) for named in texts(*call.args[:1]) or ())
