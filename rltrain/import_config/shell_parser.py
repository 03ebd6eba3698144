"""Parses a shell script into a tree of commands."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rltrain.errors import ConfigError

# The syntax tree of the shell language used in launch scripts. Nothing is expanded or run here.


@dataclass(frozen=True)
class Text:
    """Literal text."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """`$NAME`, or the text between the braces of `${...}`."""

    expression: str
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """The text between `$((` and `))`."""

    text: str


@dataclass(frozen=True)
class Substitution:
    """The text between `$(` and `)`, or between backquotes."""

    text: str
    quoted: bool


Part = Text | Variable | Arithmetic | Substitution
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """An assignment `name=value`, `name[index]=value` or `name=(...)`. With `appends` it is `+=`."""

    name: str
    index: str | None
    appends: bool
    value: Word | tuple[Word, ...]
    is_array: bool


@dataclass(frozen=True)
class Simple:
    """A command with its arguments, or assignments alone. `here` is the text of a here-document."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    here: str | None = None


@dataclass(frozen=True)
class Test:
    """A test `[[ ... ]]`."""

    words: tuple[Word, ...]


@dataclass(frozen=True)
class Calculation:
    """A calculation `(( ... ))`."""

    text: str


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&`, `||` or `|`. `negated` is true for a pipeline after a `!`."""

    first: "Command"
    rest: tuple[tuple[str, "Command"], ...]
    negated: bool


@dataclass(frozen=True)
class If:
    branches: tuple[tuple["Block", "Block"], ...]
    otherwise: "Block"


@dataclass(frozen=True)
class For:
    name: str
    words: tuple[Word, ...] | None
    body: "Block"


@dataclass(frozen=True)
class ForCount:
    """A loop `for ((initial; condition; step))`."""

    header: tuple[str, str, str]
    body: "Block"


@dataclass(frozen=True)
class While:
    condition: "Block"
    body: "Block"
    until: bool


@dataclass(frozen=True)
class Case:
    word: Word
    branches: tuple[tuple[tuple[Word, ...], "Block"], ...]


@dataclass(frozen=True)
class ShellFunction:
    name: str
    body: "Command"


@dataclass(frozen=True)
class Group:
    body: "Block"


Command = Simple | Test | Calculation | Chain | If | For | ForCount | While | Case | ShellFunction | Group
Block = tuple[Command, ...]


# The words of a script: quotes, `$` expressions, blanks, comments and redirections.

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPECIAL = "@*#?$!-0123456789"
BREAKS = " \t\n;&|<>()"
REDIRECTION = re.compile(r"[0-9]*(?:&>>|&>|>&|<&|<<<|>>|>\||<>|>|<)")
HERE = re.compile(r"[0-9]*<<(-?)(?!<)[ \t]*(\\?)(['\"]?)([A-Za-z_0-9]+)\3")


class WordReader:
    """A cursor over the text of a script."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.awaited: list[tuple[str, bool]] = []
        self.here: str | None = None

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fail(self, what: str) -> ConfigError:
        """Returns the error for the line at the cursor."""
        return ConfigError(f"{self.name}:{self.line}: {what}; expected a script that the shell accepts")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def blanks(self, newlines: bool = False) -> None:
        """Skips blanks, comments and continued lines. With `newlines` it also skips line ends and `;`."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r" or (newlines and char == ";" and not self.peek(";;")):
                self.at += 1
            elif self.peek("\\\n") or self.peek("\\\r\n"):
                self.at = self.text.index("\n", self.at) + 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n" and newlines:
                self.newline()
            else:
                return

    def newline(self) -> None:
        """Skips the end of a line, and the here-documents after it."""
        self.at += 1
        for delimiter, strips in self.awaited:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if strips else line) == delimiter:
                    break
                lines.append(line)
            self.here = "\n".join(lines)
        self.awaited = []

    def redirection(self) -> bool:
        """Skips a redirection. Returns whether there was one."""
        if here := HERE.match(self.text, self.at):
            self.at = here.end()
            self.awaited.append((here[4], bool(here[1])))
            return True
        found = REDIRECTION.match(self.text, self.at)
        if found is None:
            return False
        self.at = found.end()
        self.blanks()
        self.word()
        return True

    def word(self, breaks: str = BREAKS) -> Word:
        """Returns the word at the cursor. Empty if there is none."""
        parts: list[Part] = []
        plain = ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in breaks:
                break
            if char == "\\":
                if not self.peek("\\\n"):
                    escaped = Text(self.text[self.at + 1 : self.at + 2], True)
                    parts, plain = self._closed(parts, plain, [escaped]), ""
                self.at += 2
            elif char in "'\"$`":
                special = self._quoted_or_expanded(char)
                parts, plain = self._closed(parts, plain, special), ""
            else:
                plain += char
                self.at += 1
        return tuple(self._closed(parts, plain, []))

    @staticmethod
    def _closed(parts: list[Part], plain: str, more: list[Part]) -> list[Part]:
        return [*parts, *([Text(plain, False)] if plain else []), *more]

    def _quoted_or_expanded(self, char: str) -> list[Part]:
        if char == "'" or self.peek("$'"):
            self.at += 1 if char == "'" else 2
            end = self._find("'")
            text, self.at = self.text[self.at : end], end + 1
            return [Text(text, True)]
        if char == '"':
            self.at += 1
            return self._double_quoted()
        return [self._dollar(quoted=False)]

    def _double_quoted(self) -> list[Part]:
        parts: list[Part] = []
        plain = ""
        while not self.peek('"'):
            if self.at >= len(self.text):
                raise self.fail('a " is not closed')
            char = self.text[self.at]
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                plain += "" if following == "\n" else following if following in '$`"\\' else char + following
                self.at += 2
            elif char in "$`":
                before: list[Part] = [Text(plain, True)] if plain else []
                parts, plain = [*parts, *before, self._dollar(quoted=True)], ""
            else:
                plain += char
                self.at += 1
        self.at += 1
        return parts if parts and not plain else [*parts, Text(plain, True)]

    def _dollar(self, quoted: bool) -> Part:
        if self.take("`"):
            end = self._find("`")
            text, self.at = self.text[self.at : end], end + 1
            return Substitution(text, quoted)
        if self.peek("$((") and (inside := self._arithmetic()) is not None:
            return Arithmetic(inside)
        if self.take("$("):
            return Substitution(self._balanced("(", ")"), quoted)
        if self.take("${"):
            return Variable(self._balanced("{", "}"), quoted)
        named = NAME.match(self.text, self.at + 1)
        if named:
            self.at = named.end()
            return Variable(named[0], quoted)
        following = self.text[self.at + 1 : self.at + 2]
        if following and following in SPECIAL:
            self.at += 2
            return Variable(following, quoted)
        self.at += 1
        return Text("$", True)

    def _arithmetic(self) -> str | None:
        """Returns the text between `$((` and `))`, or None for two nested substitutions."""
        start = self.at
        self.at += 2
        inside = self._balanced("(", ")")
        if inside.startswith("(") and inside.endswith(")"):
            return inside[1:-1]
        self.at = start
        return None

    def _balanced(self, opening: str, closing: str) -> str:
        """Returns the text up to the closing bracket, and moves the cursor after it. The opening bracket is before the
        cursor."""
        start, depth = self.at, 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
                continue
            if char == "'" and not (opening == "{" and '"' in self.text[start : self.at]):
                self.at = self._find("'", self.at + 1)
            elif char == '"':
                self.at += 1
                self._double_quoted()
                continue
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if not depth:
                    self.at += 1
                    return self.text[start : self.at - 1]
            self.at += 1
        raise self.fail(f"a {opening} is not closed")

    def calculation(self) -> str:
        """Returns the text between `((` and `))`. The cursor is after the first."""
        inside = self._balanced("(", ")")
        if not self.take(")"):
            raise self.fail("(( is not closed by ))")
        return inside

    def _find(self, char: str, start: int | None = None) -> int:
        end = self.text.find(char, self.at if start is None else start)
        if end < 0:
            raise self.fail(f"a {char} is not closed")
        return end


ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([^]]*)\])?(\+?)=")
DECLARED = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*(?=[{(])")
KEYWORD = re.compile(r"(if|then|elif|else|fi|for|while|until|do|done|case|esac)(?=[\s;()&|]|$)")
DECLARING = ("export", "local", "declare", "readonly", "typeset")


def parse_script(text: str, name: str) -> Block:
    """Parses a script. Raises ConfigError with `name` and the line if the text is not a valid script."""
    parser = _Parser(text, name)
    block = parser.block(())
    if parser.at < len(text):
        raise parser.fail(f"{text[parser.at : parser.at + 10]!r} has no beginning")
    return block


class _Parser(WordReader):
    def block(self, ends: Collection[str]) -> Block:
        """Returns the commands up to one of `ends`. The cursor stays before it."""
        commands: list[Command] = []
        while True:
            self.blanks(newlines=True)
            while self.take("&"):
                self.blanks(newlines=True)
            if self.at >= len(self.text) or self._ends(ends):
                return tuple(commands)
            before = self.at
            command = self.chain()
            if self.at == before:
                return tuple(commands)
            commands.append(command)

    def _ends(self, ends: Collection[str]) -> bool:
        keyword = KEYWORD.match(self.text, self.at)
        return (keyword is not None and keyword[1] in ends) or any(self.peek(end) for end in ends if not end.isalpha())

    def chain(self) -> Command:
        first, rest = self._negated_or_not(), self._joined(("&&", "||", "|&", "|"))
        return Chain(first, rest, negated=False) if rest else first

    def _negated_or_not(self) -> Command:
        """Returns a command, or a pipeline after a `!`."""
        if not re.match(r"!\s", self.text[self.at : self.at + 2]):
            return self.command()
        self.at += 2
        self.blanks()
        return Chain(self.command(), self._joined(("|&", "|")), negated=True)

    def _joined(self, operators: Sequence[str]) -> tuple[tuple[str, Command], ...]:
        """Returns the commands that follow, with the operators before them."""
        found: list[tuple[str, Command]] = []
        while True:
            self.blanks()
            ahead = next((text for text in ("&&", "||", "|&", "|") if self.peek(text)), None)
            if ahead is None or ahead not in operators:
                return tuple(found)
            self.take(ahead)
            self.blanks(newlines=True)
            found.append((ahead, self._negated_or_not()))

    def command(self) -> Command:
        compound = self._compound()
        if compound is None:
            return self.simple()
        self.blanks()
        while self.redirection():
            self.blanks()
        return compound

    def _compound(self) -> Command | None:
        keyword = KEYWORD.match(self.text, self.at)
        if keyword is not None:
            self.at = keyword.end()
            reader = {"if": self._if, "for": self._for, "case": self._case}.get(keyword[1])
            if reader is not None:
                return reader()
            if keyword[1] in ("while", "until"):
                return self._while(keyword[1] == "until")
            raise self.fail(f"{keyword[1]} has no beginning")
        if declared := DECLARED.match(self.text, self.at):
            self.at = declared.end()
            return ShellFunction(declared[1] or declared[2], self.command())
        if self.take("(("):
            return Calculation(self.calculation())
        if self.take("[["):
            return self._test()
        for opening, closing in (("{", "}"), ("(", ")")):
            if self.peek(opening) and (opening == "(" or self.text[self.at + 1 : self.at + 2].isspace()):
                self.take(opening)
                body = self.block((closing,))
                self._expect(closing)
                return Group(body)
        return None

    def _expect(self, text: str) -> None:
        self.blanks(newlines=True)
        if not self.take(text):
            raise self.fail(f"{text} is missing")

    def _if(self) -> Command:
        branches = []
        while True:
            condition = self.block(("then",))
            self._expect("then")
            branches.append((condition, self.block(("elif", "else", "fi"))))
            if not self.take("elif"):
                break
        otherwise = self.block(("fi",)) if self.take("else") else ()
        self._expect("fi")
        return If(tuple(branches), otherwise)

    def _for(self) -> Command:
        self.blanks()
        if self.take("(("):
            header = [part.strip() for part in self.calculation().split(";")]
            if len(header) != 3:
                raise self.fail("for (( )) does not have three parts")
            return ForCount((header[0], header[1], header[2]), self._loop_body())
        name = "".join(part.text for part in self.word() if isinstance(part, Text))
        self.blanks(newlines=True)
        words: list[Word] | None = None
        if re.match(r"in\s", self.text[self.at : self.at + 3]):
            self.at += 2
            words = []
            self.blanks()
            while word := self.word():
                words.append(word)
                self.blanks()
        return For(name, None if words is None else tuple(words), self._loop_body())

    def _while(self, until: bool) -> Command:
        condition = self.block(("do",))
        return While(condition, self._loop_body(), until)

    def _loop_body(self) -> Block:
        self._expect("do")
        body = self.block(("done",))
        self._expect("done")
        return body

    def _case(self) -> Command:
        self.blanks()
        word = self.word()
        self._expect("in")
        branches = []
        self.blanks(newlines=True)
        while not self._ends(("esac",)):
            self.take("(")
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word())
                self.blanks()
                if not self.take("|"):
                    break
            self._expect(")")
            branches.append((tuple(patterns), self.block((";;", "esac"))))
            self.take(";;")
            self.blanks(newlines=True)
        self._expect("esac")
        return Case(word, tuple(branches))

    def _test(self) -> Test:
        words: list[Word] = []
        while True:
            self.blanks(newlines=True)
            if self.take("]]"):
                return Test(tuple(words))
            operator = next((text for text in ("&&", "||", "(", ")", "<", ">") if self.peek(text)), None)
            of_pattern = bool(words) and words[-1] == (Text("=~", False),)
            if operator is not None and not of_pattern:
                self.take(operator)
                words.append((Text(operator, False),))
                continue
            word = self.word(" \t\n" if of_pattern else BREAKS)
            if not word:
                raise self.fail("[[ is not closed by ]]")
            words.append(word)

    def simple(self) -> Simple:
        """Returns a simple command. `NAME=value` before its name, and `export NAME=value`, become assignments."""
        line, self.here = self.line, None
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            self.blanks()
            if self.redirection():
                continue
            declares = not words or words[0] in [(Text(name, False),) for name in DECLARING]
            assignment = self._assignment() if declares else None
            if assignment is not None:
                assignments.append(assignment)
                continue
            word = self.word()
            if self.peek("(") and word and isinstance(word[-1], Text) and not word[-1].quoted:
                raise self.fail("there is an unexpected (")
            if not word:
                break
            words.append(word)
        if self.awaited and self.peek("\n"):
            self.newline()
        return replace(Simple(tuple(assignments), tuple(words), line), here=self.here)

    def _assignment(self) -> Assignment | None:
        found = ASSIGNED.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        name, index, appends = found[1], found[2], bool(found[3])
        if not self.take("("):
            return Assignment(name, index, appends, self.word(), is_array=False)
        items: list[Word] = []
        while True:
            self.blanks(newlines=True)
            if self.take(")"):
                return Assignment(name, index, appends, tuple(items), is_array=True)
            word = self.word()
            if not word:
                raise self.fail("a list is not closed by )")
            items.append(word)
