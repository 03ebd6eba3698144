"""Expands the words of a shell script: variables, lists, arithmetic."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from rltrain.importing.shell_syntax import Arithmetic, Part, Substitution, Text, Variable, Word
from rltrain.importing.shell_values import calculate, shown, unknown
from rltrain.importing.shell_words import WordReader

EXPRESSION = re.compile(
    r"(?P<length>#(?=[\w@*]))?(?P<indirect>!)?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^]]+)\])?(?P<rest>.*)",
    re.DOTALL,
)
OPERATOR = re.compile(r"(:?[-=?+]|%%|%|##|#|//|/|\^\^|,,|:)(.*)", re.DOTALL)
Value = str | list[str]


class Variables:
    """Of a script that is read: a text or a list under each name."""

    def __init__(self, environment: dict[str, str], arguments: Sequence[str], script: str) -> None:
        self.values: dict[str, Value] = {**environment}
        self.arguments = [*arguments]
        self.script = script
        self.unset: set[str] = set()
        """Names that were asked for, without a default, and have no value."""

    def text(self, name: str) -> str:
        """The value as one text, of a list its first element."""
        found = self.lookup(name)
        return found if isinstance(found, str) else found[0] if found else ""

    def lookup(self, name: str) -> Value | None:
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        if name == "BASH_SOURCE":
            return self.script
        if name.isdigit():
            number = int(name)
            return self.script if number == 0 else self.arguments[number - 1] if number <= len(self.arguments) else None
        if name in "?$!-":
            return {"?": "0", "-": ""}.get(name, unknown(name))
        return self.values.get(name)

    def append(self, name: str, index: str | None, value: Value, appends: bool) -> None:
        """`name=value`, `name+=value`, `name[index]=value`."""
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
    """`run` gives the output of a substitution."""

    def __init__(self, variables: Variables, run: Callable[[str], str]) -> None:
        self.variables, self.run = variables, run

    def words(self, words: Iterable[Word]) -> list[str]:
        """The arguments that `words` become: unquoted values are split at blanks, lists into their elements."""
        return [argument for word in words for argument in self._split(word)]

    def text(self, word: Word, as_pattern: bool = False) -> str:
        """`word` as one text. In a pattern what is quoted means itself."""
        texts = []
        for part in word:
            values = self.part(part)
            quoted = getattr(part, "quoted", True)
            text = values if isinstance(values, str) else " ".join(values)
            texts.append(re.sub(r"([][*?])", r"[\1]", text) if as_pattern and quoted else text)
        return "".join(texts)

    def of_string(self, text: str) -> str:
        """`text` as between double quotes."""
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
            regexp = fnmatch.translate(self._operand(old)).removesuffix(r"\Z").removesuffix(r"\z")
            replacement = self._operand(new)
            return re.sub(regexp, lambda _: replacement, text, count=0 if sign == "//" else 1)
        cuts = range(len(text) + 1)
        if sign.startswith("%"):
            ends = cuts if sign == "%%" else reversed(cuts)
            return next((text[:cut] for cut in ends if fnmatch.fnmatchcase(text[cut:], pattern)), text)
        ends = reversed(cuts) if sign == "##" else cuts
        return next((text[cut:] for cut in ends if fnmatch.fnmatchcase(text[:cut], pattern)), text)


def _fields(text: str) -> list[str]:
    """Split at blanks, but not inside what is unknown."""
    return re.findall("(?:\ufdd0[^\ufdd1]*\ufdd1|\\S)+", text)
