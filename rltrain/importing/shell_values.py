"""Values of shell expressions: arithmetic and tests. A value that only running a program could tell is marked."""

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Sequence

from rltrain.errors import ConfigError

UNKNOWN = "\ufdd0"
"""Stands in a value before the text of what would have had to be run, END behind it."""
END = "\ufdd1"

OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b) if b else 0,
    ast.Mod: lambda a, b: a - b * int(a / b) if b else 0,
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 else 0,
    ast.LShift: lambda a, b: a << (b % 64),
    ast.RShift: lambda a, b: a >> (b % 64),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
OF_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
OF_FILES: dict[str, Callable[[str], bool]] = {
    "-e": os.path.exists,
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    "-s": lambda path: os.path.isfile(path) and os.path.getsize(path) > 0,
    "-x": lambda path: os.access(path, os.X_OK),
    "-r": lambda path: os.access(path, os.R_OK),
    "-w": lambda path: os.access(path, os.W_OK),
    "-L": os.path.islink,
}


def unknown(text: str) -> str:
    """A value that running `text` would give."""
    return f"{UNKNOWN}$({text}){END}"


def shown(text: str) -> str:
    """A value as it is shown to a reader."""
    return text.replace(UNKNOWN, "").replace(END, "")


def calculate(text: str, value_of: Callable[[str], str]) -> int | None:
    """The value of an arithmetic expression without assignments; None where it rests on what is not known."""
    if text.strip() and (parts := re.fullmatch(r"([^?]+)\?([^?]+):([^:]+)", text)):
        chosen = calculate(parts[1], value_of)
        return None if chosen is None else calculate(parts[2 if chosen else 3], value_of)
    python = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: f" {found[1]} ", text.strip() or "0")
    python = re.sub(r"(?<![<>!=])/(?!/)", "//", python).replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python)
    python = re.sub(r"\b0+(?=\d)", "", python)
    try:
        return _number(ast.parse(python.strip(), mode="eval").body, value_of)
    except (SyntaxError, ValueError, OverflowError, RecursionError):
        return None


def _number(node: ast.expr, value_of: Callable[[str], str]) -> int:
    """ValueError where it is none that can be told."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        text = value_of(node.id).strip() or "0"
        if UNKNOWN in text:
            raise ValueError(text)
        if re.fullmatch(r"-?[0-9]+", text):
            return int(text)
        result = calculate(text, lambda name: "" if name == node.id else value_of(name))
        if result is None:
            raise ValueError(text)
        return result
    if isinstance(node, ast.UnaryOp):
        operand = _number(node.operand, value_of)
        return (
            int(not operand) if isinstance(node.op, ast.Not) else -operand if isinstance(node.op, ast.USub) else operand
        )
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_number(node.left, value_of), _number(node.right, value_of)))
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(value, value_of)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = _number(node.left, value_of), _number(node.comparators[0], value_of)
        return int(COMPARISONS[type(node.ops[0])](left, right))
    raise ValueError(ast.dump(node))


def holds(words: Sequence[str], value_of: Callable[[str], str]) -> bool | None:
    """Whether the test `[ words ]` or `[[ words ]]` holds; None where that cannot be told. ConfigError where it is
    none."""
    rest = [*words]
    result = _either(rest, value_of)
    if rest:
        raise ConfigError(f"the test [ {' '.join(map(shown, words))} ] is none that is known here")
    return result


def _either(rest: list[str], value_of: Callable[[str], str]) -> bool | None:
    values = [_all(rest, value_of)]
    while rest and rest[0] in ("||", "-o"):
        rest.pop(0)
        values.append(_all(rest, value_of))
    return True if True in values else None if None in values else False


def _all(rest: list[str], value_of: Callable[[str], str]) -> bool | None:
    values = [_one(rest, value_of)]
    while rest and rest[0] in ("&&", "-a"):
        rest.pop(0)
        values.append(_one(rest, value_of))
    return False if False in values else None if None in values else True


def _one(rest: list[str], value_of: Callable[[str], str]) -> bool | None:
    if not rest:
        return False
    first = rest.pop(0)
    if first == "!" and rest:
        value = _one(rest, value_of)
        return None if value is None else not value
    if first == "(":
        value = _either(rest, value_of)
        if rest and rest[0] == ")":
            rest.pop(0)
        return value
    if rest and rest[0] in ("=", "==", "!=", "=~", "<", ">", *OF_NUMBERS):
        sign, second = rest.pop(0), rest.pop(0) if rest else ""
        return _compared(first, sign, second, value_of)
    if first in ("-z", "-n", "-v", *OF_FILES) and rest:
        operand = rest.pop(0)
        if first == "-v":
            return bool(value_of(operand))
        if UNKNOWN in operand:
            return None
        return OF_FILES[first](operand) if first in OF_FILES else (operand == "") == (first == "-z")
    return None if UNKNOWN in first else first != ""


def _compared(first: str, sign: str, second: str, value_of: Callable[[str], str]) -> bool | None:
    if UNKNOWN in first + second:
        return None
    if sign in OF_NUMBERS:
        result = calculate(f"({first}) {OF_NUMBERS[sign]} ({second})", value_of)
        return None if result is None else bool(result)
    if sign == "=~":
        try:
            return re.search(second, first) is not None
        except re.error:
            return None
    if sign in "<>":
        return first < second if sign == "<" else first > second
    return fnmatch.fnmatchcase(first, second) == (sign != "!=")
