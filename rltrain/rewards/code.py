"""Reward for a program in the response: the fraction of the label's tests that pass in a sandbox."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json
from rltrain.sandbox.limits import MIB, Limits
from rltrain.sandbox.means import require
from rltrain.sandbox.sandbox import Sandbox

FENCE = "```"
PYTHON = {"python", "python3", "py", ""}
INPUTS, OUTPUTS = ("stdin", "inputs"), ("stdout", "outputs")
FUNCTION, STATEMENTS, BEFORE = "fn_name", "test_list", "test_setup_code"
EXPECTED = (
    'expected JSON: a list of assert statements, {"test_list": [...], "test_setup_code": ...}, {"stdin": [...], '
    '"stdout": [...]} or {"fn_name": ..., "inputs": [...], "outputs": [...]}, with at least one test'
)

ASSERTING = """
import os, sys
answers = os.dup(1)
os.dup2(2, 1)
requests = sys.stdin
sys.stdin = open(os.devnull)
mark, before, statements, program = __import__("json").load(requests)
names = {"__name__": "__main__"}
exec(compile(before + "\\n" + program, "program.py", "exec"), names)
for number, statement in enumerate(statements):
    try:
        exec(compile(statement, "test", "exec"), names)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        os.write(answers, f"{mark} {number}\\n".encode())
os._exit(0)
"""
"""Runs the program once, then the tests one after the other. Prints of the program go to standard error."""

CALLING = """
import json, os, sys
answers = os.dup(1)
os.dup2(2, 1)
requests = sys.stdin
sys.stdin = open(os.devnull)
program, function, arguments = json.load(requests)
names = {"__name__": "program"}
exec(compile("from typing import *\\n" + program, "program.py", "exec"), names)
called = names[function] if function in names else getattr(names["Solution"](), function)
os.write(answers, json.dumps(called(*arguments)).encode())
os._exit(0)
"""
"""Calls a function of the program, or a method of its class Solution. The expected result never enters the sandbox."""


def code(
    prompt: str,
    response: str,
    label: str,
    *,
    all_or_nothing: bool = False,
    sandbox: str = "auto",
    test_timeout_s: float = 5.0,
    memory_mb: int = 512,
    tolerance: float = 0.0,
    installed_packages: bool = False,
) -> float:
    """Returns the fraction of the label's tests passed by the last fenced Python block of the response. Returns 0
    without such a block.

    - `all_or_nothing`: the reward is 1 if all tests pass, else 0.
    - `sandbox`: auto, bubblewrap, kernel or none, as in docs/sandbox.md.
    - `test_timeout_s`: CPU seconds of one run. The wall time may be twice as long.
    - `memory_mb`: MiB of one run. Each input is a run. All assert statements share one run.
    - `tolerance`: allowed absolute difference of numbers in outputs.
    - `installed_packages`: programs can import the packages installed here.

    Raises DataError if the label has no tests, and ConfigError if this machine cannot make the sandbox.
    """
    tests = label_tests(label)
    program = last_python_block(response)
    if program is None:
        return 0.0
    limits = Limits(wall_s=2 * test_timeout_s, cpu_s=test_timeout_s, memory_bytes=memory_mb * MIB)
    verdicts = []
    for passed in tests.verdicts(program, _sandbox(sandbox, installed_packages), limits, tolerance):
        verdicts.append(passed)
        if all_or_nothing and not passed:
            return 0.0
    return sum(verdicts) / len(verdicts)


@cache
def _sandbox(setting: str, installed_packages: bool) -> Sandbox:
    return Sandbox(require(setting, key="reward.options.sandbox"), installed_packages=installed_packages)


def last_python_block(response: str) -> str | None:
    """Returns the text of the last ``` block marked as Python or unmarked, or None."""
    last: str | None = None
    block: list[str] | None = None
    language = indentation = ""
    for line in response.split("\n"):
        mark = line.strip()
        if block is None:
            if mark.startswith(FENCE):
                language, block = mark.removeprefix(FENCE).strip().lower(), []
                indentation = line[: line.index(FENCE)]
        elif mark == FENCE:
            last = "\n".join(block) if language in PYTHON else last
            block = None
        else:
            block.append(line.removeprefix(indentation))
    return last


class Tests:
    """The tests of one label."""

    def verdicts(self, program: str, sandbox: Sandbox, limits: Limits, tolerance: float) -> Iterator[bool]:
        """Runs the tests in order and yields whether each passes."""
        raise NotImplementedError


@dataclass(frozen=True)
class OutputTests(Tests):
    """Tests with standard input and the expected standard output."""

    pairs: Sequence[tuple[str, str]]

    def verdicts(self, program: str, sandbox: Sandbox, limits: Limits, tolerance: float) -> Iterator[bool]:
        for given, expected in self.pairs:
            outcome = sandbox.run_python(program, stdin=given.encode(), limits=limits)
            yield outcome.succeeded and same_words(outcome.stdout.decode(errors="replace"), expected, tolerance)


@dataclass(frozen=True)
class CallTests(Tests):
    """Tests that call a function and compare the returned JSON value."""

    function: str
    pairs: Sequence[tuple[Sequence[Any], Any]]

    def verdicts(self, program: str, sandbox: Sandbox, limits: Limits, tolerance: float) -> Iterator[bool]:
        for arguments, expected in self.pairs:
            request = json.dumps([program, self.function, arguments]).encode()
            outcome = sandbox.run_python(CALLING, stdin=request, limits=limits)
            yield outcome.succeeded and _is_returned(outcome.stdout, expected)


@dataclass(frozen=True)
class StatementTests(Tests):
    """Statements, such as asserts, that raise an error if the program is wrong. They run in its process, after it."""

    before: str
    statements: Sequence[str]

    def verdicts(self, program: str, sandbox: Sandbox, limits: Limits, tolerance: float) -> Iterator[bool]:
        mark = secrets.token_hex(16)
        request = json.dumps([mark, self.before, self.statements, program]).encode()
        printed = (
            sandbox.run_python(ASSERTING, stdin=request, limits=limits).stdout.decode(errors="replace").split("\n")
        )
        yield from (f"{mark} {number}" in printed for number in range(len(self.statements)))


def label_tests(label: str) -> Tests:
    """Returns the tests of a label. Raises DataError if there are none."""
    try:
        given = parse_json(label)
        if isinstance(given, list):
            given = {STATEMENTS: given}
        if isinstance(given, dict):
            return _statement_tests(given) if STATEMENTS in given else _paired_tests(given)
        raise ValueError(f"it is {type(given).__name__}")
    except ValueError as error:
        raise DataError(f"the label {label!r:.100} has no runnable tests: {error}; {EXPECTED}") from error


def _statement_tests(given: Mapping[str, Any]) -> Tests:
    statements, before = given[STATEMENTS], given.get(BEFORE) or ""
    if not isinstance(before, str):
        raise ValueError(f"{BEFORE} is not a text")
    if not (statements and isinstance(statements, list) and all(isinstance(text, str) for text in statements)):
        raise ValueError("the statements are not a list of texts")
    return StatementTests(before, statements)


def _paired_tests(given: Mapping[str, Any]) -> Tests:
    inputs, outputs = (next((given[key] for key in keys if key in given), None) for keys in (INPUTS, OUTPUTS))
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError("inputs and outputs are not lists of equal length")
    if function := given.get(FUNCTION):
        return CallTests(function, [(_arguments(i), o) for i, o in zip(inputs, outputs, strict=True)])
    return OutputTests([(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)])


def _arguments(given: Any) -> Sequence[Any]:
    """Returns the arguments of a call. They are a list, or a text with one JSON value per line."""
    if isinstance(given, str):
        return [parse_json(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise ValueError("the arguments of a call are not a list")
    return given


def _text(given: Any) -> str:
    """Returns the text. A list has one line per element."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _is_returned(answer: bytes, expected: Any) -> bool:
    """Returns whether the answer equals the expected value. Some data sets wrap that value in a list of one, or write
    it as JSON."""
    try:
        value = parse_json(answer)
    except ValueError:
        return False
    if value == expected or (isinstance(expected, list) and len(expected) == 1 and value == expected[0]):
        return True
    try:
        return isinstance(expected, str) and bool(value == parse_json(expected))
    except ValueError:
        return False


def same_words(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Returns whether both texts have the same words on the same lines. White space between words and empty lines at
    the end are ignored. With `tolerance`, numbers may differ by that much."""
    lines, expected_lines = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, expected))
    if lines == expected_lines:
        return True
    if not tolerance or [len(line) for line in lines] != [len(line) for line in expected_lines]:
        return False
    words = (
        (a, b) for line, other in zip(lines, expected_lines, strict=True) for a, b in zip(line, other, strict=True)
    )
    return all(a == b or _near(a, b, tolerance) for a, b in words)


def _near(word: str, expected: str, tolerance: float) -> bool:
    try:
        return abs(float(word) - float(expected)) <= tolerance
    except ValueError:
        return False
