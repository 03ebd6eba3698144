"""Finds the commands started by a shell script, and their arguments, without running any program.

A program counts as failed if an `if`, or a command with both `&&` and `||`, checks its exit status. Most such programs
look for hardware. All other programs count as successful. A check that would end the script with an error counts as
passed, and the variables that it finds empty as unknown. A loop that waits counts as ended. Unknown output of programs
is marked in values (`shell_values.UNKNOWN`).
"""

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.errors import ConfigError
from rltrain.import_config.shell_parser import (
    Assignment,
    Block,
    Calculation,
    Case,
    Chain,
    Command,
    For,
    ForCount,
    Group,
    If,
    ShellFunction,
    Simple,
    Test,
    Variable,
    While,
    Word,
    parse_script,
)
from rltrain.import_config.shell_values import UNKNOWN, Expansion, Variables, calculate, holds, shown, succeeds, unknown

MOST_TURNS = 10000
"""Most iterations of all loops of a script together."""
DEEPEST = 40
STEP = re.compile(r"([A-Za-z_]\w*)\s*(=|\+=|-=|\*=|\+\+|--)\s*(.*)", re.DOTALL)
PRINTING = ("echo", "printf", "seq", "basename", "dirname", "pwd", "cat", "cd")
COUNTED = re.compile(r"echo\s+(\S+)\s*\|\s*tr\s+(?:-s\s+)?['\"],['\"]\s+['\"](?:\\n| )['\"]\s*\|\s*wc\s+-[lw]")
"""A count of the entries of a list with commas, such as CUDA_VISIBLE_DEVICES."""
SUM = re.compile(r"expr\s+(.+)")
RANK = re.compile(r"(^|_)(RANK|NODEID|NODE_ID|PROCID|TASK_INDEX|NODE_INDEX)$", re.IGNORECASE)
"""Names of variables that a cluster sets to the number of the node."""
IGNORED = ("export", "local", "declare", "readonly", "typeset", "trap", "wait", "shopt", "ulimit")
BUILT_IN = {"true": True, ":": True, "false": False}


@dataclass(frozen=True)
class StartedCommand:
    """A command started by the script."""

    arguments: tuple[str, ...]
    line: int


@dataclass
class ScriptReading:
    """The started commands of a script, with assumptions and unset variables."""

    started: list[StartedCommand] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)
    """Assumptions made without running the script, in words."""
    unset: set[str] = field(default_factory=set)


class _LeftError(Exception):
    """Ends the script or one of its functions."""


class _LoopLeftError(Exception):
    """Ends loops, or one turn of a loop (`goes_on`). `levels` are those still to leave."""

    def __init__(self, levels: int, goes_on: bool) -> None:
        self.levels, self.goes_on = levels, goes_on


def read_script(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptReading:
    """Returns the commands of the script at `path`. Raises ConfigError, with the line, if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the script cannot be read: {error}") from error
    return read_text(text, str(path), arguments, environment)


def read_text(text: str, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptReading:
    """Returns the commands of a script's text."""
    script = _Script(Variables(dict(environment), arguments, name))
    with suppress(_LeftError, _LoopLeftError):
        script.block(parse_script(text, name))
    script.reading.unset = script.variables.unset
    return script.reading


class _Script:
    def __init__(self, variables: Variables, reading: ScriptReading | None = None) -> None:
        self.variables = variables
        self.reading = reading or ScriptReading()
        self.functions: dict[str, Command] = {}
        self.expansion = Expansion(variables, self.output)
        self.printed: list[str] | None = None
        self.folder = ""
        self.turns, self.depth = 0, 0
        self.checks: list[Block] = []
        """Conditions of the branches that are being run."""
        self.loops = 0

    def block(self, commands: Iterable[Command]) -> bool | None:
        """Runs commands. Returns whether the last one succeeds, or None if unknown."""
        status: bool | None = True
        for command in commands:
            status = self.command(command)
        return status

    def command(self, command: Command) -> bool | None:
        if isinstance(command, Simple):
            return self.simple(command)
        if isinstance(command, Chain):
            return self.chain(command)
        if isinstance(command, Test):
            return self._test(command)
        if isinstance(command, Calculation):
            result = self.step(command.text)
            return None if result is None else bool(result)
        if isinstance(command, ShellFunction):
            self.functions[command.name] = command.body
            return True
        if isinstance(command, Group):
            return self.block(command.body)
        if isinstance(command, If):
            return self._if(command)
        if isinstance(command, Case):
            return self._case(command)
        return self._loop(command)

    def _if(self, command: If) -> bool | None:
        asked: Block = ()
        for condition, body in command.branches:
            asked += (*condition,)
            if self.asked(condition):
                return self.checked(asked, body)
        return self.checked(asked, command.otherwise)

    def checked(self, conditions: Block, body: Block) -> bool | None:
        """Runs a branch. It can end the script only without an error."""
        self.checks.append(conditions)
        try:
            return self.block(body)
        finally:
            self.checks.pop()

    def passes(self) -> None:
        """Counts the current check as passed. Variables that it finds empty are unknown from here on."""
        names = [name for word in _words_of(self.checks[-1]) for name in _names_in(word)]
        for name in names:
            if not self.variables.text(name):
                self.variables.unset.add(name)
                self.variables.values[name] = unknown(f"${name}")
        about = f" of {', '.join(dict.fromkeys(names))}" if names else ""
        self.assume(f"a check{about} that would end the script was assumed to pass")

    def asked(self, condition: Iterable[Command]) -> bool:
        status = self.block(condition)
        return bool(status)

    def chain(self, chain: Chain) -> bool | None:
        operators = {sign for sign, _ in chain.rest}
        asks = {"&&", "||"} <= operators
        status = self.command(chain.first)
        for sign, command in chain.rest:
            known = status if status is not None or asks else sign == "&&" or "|" in operators or "&&" in operators
            if sign in ("|", "|&"):
                status = self.command(command)
            elif bool(known) == (sign == "&&"):
                status = self.checked((chain.first,), (command,))
            elif sign == "||" and status is None:
                status = None
        return status if not chain.negated else None if status is None else not status

    def _test(self, test: Test) -> bool | None:
        words = []
        for word, sign in zip(test.words, ["", *map(_plain, test.words)], strict=False):
            text = self.expansion.text(word, as_pattern=sign in ("=", "==", "!="))
            words.append(self.ranked(word, sign, [text])[0])
        return holds(words, self.variables.text)

    def ranked(self, word: Word, sign: str, values: list[str]) -> list[str]:
        """Returns the values of a word of a test after the word `sign`. A rank of the node without a value is 0."""
        names = [name for name in _names_in(word) if RANK.search(name)]
        if any(values) or not names or sign in ("-z", "-n", "-v"):
            return values
        self.assume(f"{names[0]} has no value: the script is read as on the first node")
        return ["0"]

    def _case(self, case: Case) -> bool | None:
        value = self.expansion.text(case.word)
        for patterns, body in case.branches:
            if any(fnmatch.fnmatchcase(value, self.expansion.text(word, as_pattern=True)) for word in patterns):
                if UNKNOWN in value:
                    self.assume(f"{shown(value)} was assumed to match none of the named cases")
                return self.checked((), body)
        return True

    def _loop(self, loop: For | ForCount | While) -> bool | None:
        if isinstance(loop, For):
            return self._each(loop)
        initial, condition, step = loop.header if isinstance(loop, ForCount) else ("", "", "")
        if initial:
            self.step(initial)
        while True:
            if isinstance(loop, ForCount):
                goes_on = self.step(condition) if condition else 1
            else:
                status = self.block(loop.condition)
                goes_on = None if status is None else status != loop.until
            if not goes_on:
                return True if goes_on is not None else None
            if not self.turn(loop.body):
                return True
            if isinstance(loop, While) and _waits(loop.body):
                self.assume("a loop that waits was assumed to end")
                return True
            if step:
                self.step(step)

    def _each(self, loop: For) -> bool | None:
        values = self.variables.arguments if loop.words is None else self.expansion.words(loop.words)
        for value in [*values]:
            if UNKNOWN in value:
                return None
            self.variables.values[loop.name] = value
            if not self.turn(loop.body):
                break
        return True

    def turn(self, body: Block) -> bool:
        """Runs one turn of a loop. Returns whether the loop goes on."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise ConfigError(f"{self.variables.script}: its loops have more than {MOST_TURNS} iterations")
        self.loops += 1
        try:
            self.block(body)
        except _LoopLeftError as left:
            if left.levels > 1 and self.loops > 1:
                raise _LoopLeftError(left.levels - 1, left.goes_on) from None
            return left.goes_on
        finally:
            self.loops -= 1
        return True

    def step(self, text: str) -> int | None:
        """Returns the value of an arithmetic expression. It may contain an assignment."""
        found = STEP.fullmatch(text.strip())
        if found is None or found[3].startswith("="):
            return calculate(self.expansion.of_string(text), self.variables.text)
        name, sign, right = found[1], found[2], found[3]
        operand = "1" if sign in ("++", "--") else f"({self.expansion.of_string(right)})"
        result = calculate(operand if sign == "=" else f"{name} {sign[0]} {operand}", self.variables.text)
        self.variables.values[name] = unknown(text) if result is None else str(result)
        return result

    def assign(self, assignment: Assignment) -> None:
        value = assignment.value
        if assignment.is_array:
            new: str | list[str] = self.expansion.words(value)  # type: ignore[arg-type]
        else:
            new = self.expansion.text(value)  # type: ignore[arg-type]
        index = self.expansion.of_string(assignment.index) if assignment.index else None
        self.variables.append(assignment.name, index, new, assignment.appends)

    def simple(self, command: Simple) -> bool | None:
        for assignment in command.assignments:
            self.assign(assignment)
        arguments = self.expansion.words(command.words)
        if not arguments:
            return True
        if arguments[0] == "read" and any(word.startswith("-") and "a" in word for word in arguments):
            self.assume(f"{' '.join(arguments)}: its words are not known, and are left out")
        known = self.built_in(arguments, command)
        if known is None or isinstance(known, bool):
            return known
        if self.printed is None:
            self.reading.started.append(StartedCommand(tuple(arguments), command.line))
        return None

    def built_in(self, arguments: list[str], command: Simple) -> object:
        """Runs a built-in command of the shell. Returns its result, or NotImplemented for a program."""
        name, rest = arguments[0], arguments[1:]
        if name in BUILT_IN:
            return BUILT_IN[name]
        if name in ("[", "test"):
            words = command.words[1:]
            pairs = zip(((), *words), words, strict=False)
            found = (self.ranked(word, _plain(before), self.expansion.words([word])) for before, word in pairs)
            rest = [value for values in found for value in values]
            return succeeds(rest[:-1] if name == "[" else rest, self.variables.text)
        if name == "exit" and rest[:1] not in ([], ["0"]) and self.checks:
            self.passes()
            return None
        if name in ("exit", "return"):
            raise _LeftError
        if name in ("break", "continue") and self.loops:
            levels = int(rest[0]) if rest and rest[0].isdigit() else 1
            raise _LoopLeftError(levels, name == "continue")
        if name in self.functions:
            return self._call(name, rest)
        if name in PRINTING:
            return self._prints(name, rest, command)
        if name in ("shift", "unset", "set"):
            return self._changes(name, rest)
        if name in IGNORED:
            return True
        return self._scripts(name, rest)

    def _changes(self, name: str, rest: list[str]) -> bool:
        if name == "shift":
            del self.variables.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "unset":
            for variable in rest:
                self.variables.values.pop(variable, None)
        elif rest[:1] == ["--"]:
            self.variables.arguments = rest[1:]
        return True

    def _scripts(self, name: str, rest: list[str]) -> object:
        """Runs scripts read or started by a script."""
        if name in ("source", ".") and rest:
            return self._source(rest[0], rest[1:])
        if name == "eval":
            return self.nested(" ".join(rest))
        if name not in ("bash", "sh") or not rest:
            return NotImplemented
        if rest[0].startswith("-") and rest[0].endswith("c") and len(rest) > 1:
            return self.nested(rest[1])
        file = self.started(rest[0])
        if file is None:
            return NotImplemented
        before = self.variables.arguments, dict(self.variables.values)
        self.variables.arguments = rest[1:]
        with suppress(_LeftError):  # another process: what it sets and its exit do not matter here
            self._source(file, rest[1:])
        self.variables.arguments, self.variables.values = before
        return True

    def started(self, name: str) -> str | None:
        """Returns the path of a started script. Like a config file, it is also searched from the script upwards."""
        if UNKNOWN in name:
            return None
        if Path(self.folder, name).is_file():
            return name
        above = () if Path(name).is_absolute() else Path(self.variables.script).resolve().parents
        return next((str(folder / name) for folder in above if (folder / name).is_file()), None)

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        before, self.variables.arguments = self.variables.arguments, arguments
        loops, self.loops = self.loops, 0
        self.deeper()
        try:
            return self.command(self.functions[name])
        except _LeftError:
            return True
        finally:
            self.variables.arguments, self.loops = before, loops
            self.depth -= 1

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ConfigError(f"{self.variables.script}: it is nested more than {DEEPEST} levels deep")

    def _source(self, name: str, arguments: list[str]) -> bool | None:
        path = Path(self.folder, name)
        if UNKNOWN in name or not path.is_file():
            self.assume(f"the sourced file {shown(name)} was not found and left out")
            return None
        self.deeper()
        before, self.variables.source = self.variables.source, str(path)
        try:
            self.block(parse_script(path.read_text(encoding="utf-8", errors="replace"), str(path)))
        finally:
            self.variables.source = before
            self.depth -= 1
        return True

    def nested(self, text: str) -> bool | None:
        self.deeper()
        try:
            return self.block(parse_script(text, self.variables.script))
        except _LeftError:
            return True
        finally:
            self.depth -= 1

    def _prints(self, name: str, rest: list[str], command: Simple) -> object:
        """Runs commands that only print."""
        rest = [one for one in rest if one != "--"]
        if name == "cd":
            self.folder = os.path.normpath(os.path.join(self.folder, rest[0])) if rest else self.folder
            return True
        if name == "cat" and command.here is None:
            return NotImplemented
        if name == "printf" and rest[:1] == ["-v"]:
            self.variables.values[rest[1]] = _formatted(rest[2:])
            return True
        texts = {
            "echo": lambda: " ".join(one for one in rest if one not in ("-n", "-e")),
            "printf": lambda: _formatted(rest),
            "seq": lambda: _sequence(rest),
            "basename": lambda: os.path.basename(rest[0].rstrip("/")).removesuffix("".join(rest[1:2])),
            "dirname": lambda: os.path.dirname(rest[0]) or ".",
            "pwd": lambda: self.folder or os.getcwd(),
            "cat": lambda: self.expansion.of_string(command.here or ""),
        }
        if self.printed is not None:
            self.printed.append(texts[name]() if rest or name in ("pwd", "cat") else "")
        return True

    def output(self, text: str) -> str:
        """Returns the output of a substitution."""
        if (found := COUNTED.fullmatch(text.strip())) or (found := SUM.fullmatch(text.strip())):
            given = self.expansion.of_string(found[1].strip("\"'"))
            if found.re is SUM:
                result = calculate(given, self.variables.text)
                return unknown(text.strip()) if result is None else str(result)
            if given and UNKNOWN not in given:
                return str(given.count(",") + 1)
        inner = _Script(self.variables, self.reading)
        inner.functions, inner.printed, inner.depth = self.functions, [], self.depth + 1
        inner.deeper()
        before = dict(self.variables.values)
        status: bool | None = True
        try:
            block = parse_script(text, self.variables.script)
            status = inner.block(block)
        except (_LeftError, IndexError):
            status = None
        finally:
            self.variables.values = before
        if (status is None and not inner.printed) or "|" in text.replace("||", ""):
            return unknown(text.strip())
        return "\n".join(inner.printed or []).rstrip("\n")

    def assume(self, text: str) -> None:
        self.reading.assumed[text] = None


def _words_of(commands: Iterable[Command]) -> Iterable[Word]:
    """Yields the words of the tests in a condition."""
    for command in commands:
        if isinstance(command, Simple | Test):
            yield from command.words
        elif isinstance(command, Chain):
            yield from _words_of((command.first, *(one for _, one in command.rest)))


def _names_in(word: Word) -> Iterable[str]:
    """Yields the names of variables whose whole value is a word of a test."""
    if len(word) == 1 and isinstance(word[0], Variable):
        found = re.match(r"[A-Za-z_]\w*", word[0].expression)
        if found is not None:
            yield found[0]


def _plain(word: Word) -> str:
    """Returns the plain text of a word, such as the operator of a test."""
    return "".join(getattr(part, "text", "") for part in word)


def _waits(commands: Iterable[Command]) -> bool:
    """Returns whether commands contain a `sleep`."""
    return any(map(_sleeps, commands))


def _sleeps(command: Command) -> bool:
    if isinstance(command, Simple):
        first = command.words[0][0] if command.words and command.words[0] else None
        return getattr(first, "text", None) == "sleep"
    if isinstance(command, If):
        return _waits(command.otherwise) or any(_waits(body) for _, body in command.branches)
    if isinstance(command, Chain):
        return _waits((command.first, *(one for _, one in command.rest)))
    return isinstance(command, Group) and _waits(command.body)


def _formatted(rest: list[str]) -> str:
    """Formats %s and %d of printf, each once."""
    if not rest:
        return ""
    values = iter(rest[1:])
    text = re.sub(r"%[-0-9.]*[sdiq]", lambda found: next(values, ""), rest[0])
    return text.replace("\\n", "\n").replace("%%", "%")


def _sequence(rest: list[str]) -> str:
    try:
        numbers = [int(one) for one in rest]
    except ValueError:
        return unknown(f"seq {' '.join(map(shown, rest))}")
    first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], 1, numbers[1])
    if len(numbers) == 3:
        first, step, last = numbers
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step or 1)))
