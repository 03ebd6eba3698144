"""Evaluates shell expressions and expands words. Values that only a run could determine are marked."""

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence

from rltrain.errors import ConfigError
from rltrain.import_config.shell_parser import Arithmetic, Part, Substitution, Text, Variable, Word, WordReader

# Arithmetic and tests.

UNKNOWN = "\ufdd0"
"""Marks in a value the beginning of the text that would have to be run. END marks its end."""
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
    """Returns the marked value for the result of running `text`."""
    return f"{UNKNOWN}$({text}){END}"


def shown(text: str) -> str:
    """Returns a value without marks, for messages."""
    return text.replace(UNKNOWN, "").replace(END, "")


def calculate(text: str, value_of: Callable[[str], str]) -> int | None:
    """Returns the value of an arithmetic expression without assignments. None if it depends on an unknown value."""
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
    """Returns the value of a node. Raises ValueError if it is unknown."""
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
    """Returns whether the test `[[ words ]]` holds, or None if unknown. Raises ConfigError if it is not a supported
    test."""
    rest = [*words]
    result = _either(rest, value_of)
    if rest:
        raise ConfigError(f"the test [[ {' '.join(map(shown, words))} ]] is not supported")
    return result


def succeeds(words: Sequence[str], value_of: Callable[[str], str]) -> bool | None:
    """Returns whether `[ words ]` succeeds, or None if unknown. As in bash, a test with an operand missing, such as an
    empty variable without quotes, or with a text for a number, is an error and fails."""
    known = not any(UNKNOWN in word for word in words)
    compared = [at for at, sign in enumerate(words) if sign in OF_NUMBERS]
    numbers = [words[at + by] for at in compared for by in (-1, 1) if 0 <= at + by < len(words)]
    if known and any(re.fullmatch(r"\s*[-+]?[0-9]+\s*", one) is None for one in numbers):
        return False
    rest = [*words]
    result = _either(rest, value_of)
    if not rest:
        return result
    return False if known else None


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
        result = calculate(f"({first or 0}) {OF_NUMBERS[sign]} ({second or 0})", value_of)
        return None if result is None else bool(result)
    if sign == "=~":
        try:
            return re.search(second, first) is not None
        except re.error:
            return None
    if sign in "<>":
        return first < second if sign == "<" else first > second
    return fnmatch.fnmatchcase(first, second) == (sign != "!=")


# Expansion of words: variables, lists and arithmetic.

EXPRESSION = re.compile(
    r"(?P<length>#(?=[\w@*]))?(?P<indirect>!)?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^]]+)\])?(?P<rest>.*)",
    re.DOTALL,
)
OPERATOR = re.compile(r"(:?[-=?+]|%%|%|##|#|//|/|\^\^|,,|:)(.*)", re.DOTALL)
Value = str | list[str]


class Variables:
    """The variables of a script. Each value is a text or a list."""

    def __init__(self, environment: dict[str, str], arguments: Sequence[str], script: str) -> None:
        self.values: dict[str, Value] = {**environment}
        self.arguments = [*arguments]
        self.script = script
        self.source = script
        """The file that is read, or another one while it is sourced."""
        self.unset: set[str] = set()
        """Names used without a default and without a value."""

    def text(self, name: str) -> str:
        """Returns the value as one text. For a list it is the first element."""
        found = self.lookup(name)
        return found if isinstance(found, str) else found[0] if found else ""

    def lookup(self, name: str) -> Value | None:
        """Returns the value of a variable or a special parameter, or None if it is not set."""
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        if name == "BASH_SOURCE":
            return self.source
        if name.isdigit():
            number = int(name)
            return self.script if number == 0 else self.arguments[number - 1] if number <= len(self.arguments) else None
        if name in "?$!-":
            return {"?": "0", "-": ""}.get(name, unknown(name))
        return self.values.get(name)

    def append(self, name: str, index: str | None, value: Value, appends: bool) -> None:
        """Assigns `name=value`, `name+=value` or `name[index]=value`."""
        before = self.values.get(name)
        if index is not None and not isinstance(value, list):
            number = calculate(index, self.text) or 0
            items = [*before] if isinstance(before, list) else []
            items += [""] * (number + 1 - len(items))
            items[number] = value
            self.values[name] = items
        elif appends and isinstance(value, list):
            self.values[name] = [*(before if isinstance(before, list) else [before] if before else []), *value]
        elif appends and isinstance(before, str) and isinstance(value, str):
            self.values[name] = before + value
        else:
            self.values[name] = value


class Expansion:
    """Expands words. `run` returns the output of a substitution."""

    def __init__(self, variables: Variables, run: Callable[[str], str]) -> None:
        self.variables, self.run = variables, run

    def words(self, words: Iterable[Word]) -> list[str]:
        """Returns the arguments for `words`. Unquoted values are split at blanks, and lists into elements."""
        return [argument for word in words for argument in self._split(word)]

    def text(self, word: Word, as_pattern: bool = False) -> str:
        """Returns `word` as one text. In a pattern quoted characters are literal."""
        texts = []
        for part in word:
            values = self.part(part)
            quoted = getattr(part, "quoted", True)
            text = values if isinstance(values, str) else " ".join(values)
            texts.append(re.sub(r"([][*?])", r"[\1]", text) if as_pattern and quoted else text)
        return "".join(texts)

    def of_string(self, text: str) -> str:
        """Expands `text` as if between double quotes."""
        reader = WordReader(text.replace('"', '\\"') + '"', "an expression")
        return self.text(tuple(reader._double_quoted()))

    def _split(self, word: Word) -> list[str]:
        arguments: list[str] = []
        open_word: str | None = None
        for part in word:
            value = self.part(part)
            quoted = getattr(part, "quoted", False) or isinstance(part, Text)
            pieces = value if isinstance(value, list) else [value]
            if not quoted:
                pieces = [piece for one in pieces for piece in _fields(one)]
            if quoted and isinstance(value, str):
                open_word = (open_word or "") + value
                continue
            for number, piece in enumerate(pieces):
                if number:
                    arguments.append(open_word or "")
                    open_word = piece
                else:
                    open_word = (open_word or "") + piece
        if open_word is not None:
            arguments.append(open_word)
        return arguments

    def part(self, part: Part) -> Value:
        """Returns the value of a part of a word. Lists keep their elements."""
        if isinstance(part, Text):
            return part.text
        if isinstance(part, Substitution):
            return self.run(part.text)
        if isinstance(part, Arithmetic):
            result = calculate(self.of_string(part.text), self.variables.text)
            return unknown(f"({part.text})") if result is None else str(result)
        return self._variable(part)

    def _variable(self, part: Variable) -> Value:
        found = EXPRESSION.fullmatch(part.expression)
        if found is None:
            return unknown(part.expression)
        name, index = found["name"], found["index"]
        if found["indirect"]:
            if index in ("@", "*"):
                items = self.variables.lookup(name)
                return [str(number) for number in range(len(items))] if isinstance(items, list) else []
            name = self.variables.text(name)
        value = self._indexed(name, index)
        if found["length"]:
            return str(len(value or ""))
        if found["rest"]:
            value = self._changed(name, value, found["rest"])
        elif value is None and name not in ("@", "*"):
            self.variables.unset.add(name)
        joined = index == "*" or name == "*"
        if isinstance(value, list) and joined and part.quoted:
            return self.variables.text("IFS")[:1].join(value) if "IFS" in self.variables.values else " ".join(value)
        return "" if value is None else value

    def _indexed(self, name: str, index: str | None) -> Value | None:
        value = self.variables.lookup(name)
        if index in ("@", "*"):
            return value if isinstance(value, list) else [] if value is None else [value]
        if isinstance(value, list) and name not in ("@", "*"):
            number = calculate(self.of_string(index), self.variables.text) if index else 0
            return value[number] if number is not None and -len(value) <= number < len(value) else None
        return value

    def _changed(self, name: str, value: Value | None, rest: str) -> Value | None:
        found = OPERATOR.fullmatch(rest)
        if found is None:
            return unknown(f"{name}{rest}")
        sign, operand = found[1], found[2]
        text = value if isinstance(value, str) else " ".join(value or [])
        absent = value is None or (sign.startswith(":") and not text)
        if sign in (":-", "-", ":=", "="):
            if not absent:
                return value
            default = self._operand(operand)
            if sign.endswith("="):
                self.variables.append(name, None, default, appends=False)
            return default
        if sign in (":+", "+"):
            return "" if absent else self._operand(operand)
        if sign in (":?", "?"):
            return unknown(f"{name} is to be set: {shown(self._operand(operand))}") if absent else value
        if isinstance(value, list) and sign == ":":
            return value[self._slice(operand, name in ("@", "*"))]
        changed = [self._edited(one, sign, operand) for one in (value if isinstance(value, list) else [text])]
        return changed if isinstance(value, list) else changed[0]

    def _operand(self, text: str) -> str:
        reader = WordReader(text, "an expression")
        return self.text(reader.word(breaks=""))

    def _slice(self, operand: str, of_arguments: bool) -> slice:
        first, _, count = operand.partition(":")
        start = calculate(self.of_string(first), self.variables.text) or 0
        start -= 1 if of_arguments and start > 0 else 0
        length = calculate(self.of_string(count), self.variables.text) if count else None
        return slice(start, None if length is None else start + length)

    def _edited(self, text: str, sign: str, operand: str) -> str:
        if sign == ":":
            return text[self._slice(operand, of_arguments=False)]
        if sign in ("^^", ",,"):
            return text.upper() if sign == "^^" else text.lower()
        pattern = self._operand(operand)
        if sign.startswith("/"):
            old, _, new = operand.partition("/")
            anchor = old[:1] if sign == "/" and old[:1] in ("#", "%") else ""
            regexp = fnmatch.translate(self._operand(old.removeprefix(anchor))).removesuffix(r"\Z").removesuffix(r"\z")
            regexp = rf"\A{regexp}" if anchor == "#" else rf"{regexp}\Z" if anchor else regexp
            replacement = self._operand(new)
            return re.sub(regexp, lambda _: replacement, text, count=0 if sign == "//" else 1)
        cuts = range(len(text) + 1)
        if sign.startswith("%"):
            ends = cuts if sign == "%%" else reversed(cuts)
            return next((text[:cut] for cut in ends if fnmatch.fnmatchcase(text[cut:], pattern)), text)
        ends = reversed(cuts) if sign == "##" else cuts
        return next((text[cut:] for cut in ends if fnmatch.fnmatchcase(text[:cut], pattern)), text)


def _fields(text: str) -> list[str]:
    """Splits at blanks outside of unknown parts."""
    return re.findall("(?:\ufdd0[^\ufdd1]*\ufdd1|\\S)+", text)
