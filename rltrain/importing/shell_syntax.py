"""The part of the shell's language that launch scripts are written in, as a tree. Nothing is expanded or run here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """`$NAME`, or what stands between the braces of `${...}`."""

    expression: str
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """What stands between `$((` and `))`."""

    text: str


@dataclass(frozen=True)
class Substitution:
    """What stands between `$(` and `)`, or between backquotes."""

    text: str
    quoted: bool


Part = Text | Variable | Arithmetic | Substitution
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    name: str
    index: str | None
    appends: bool
    value: Word | tuple[Word, ...]
    is_array: bool


@dataclass(frozen=True)
class Simple:
    """A command with its arguments, or assignments alone. `here` is a here-document's text."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    here: str | None = None


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`."""

    words: tuple[Word, ...]


@dataclass(frozen=True)
class Calculation:
    """`(( ... ))`."""

    text: str


@dataclass(frozen=True)
class Chain:
    """Commands with `&&`, `||` or `|` before each but the first; `negated` by `!`."""

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
    """`for ((initial; condition; step))`."""

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
class Function:
    name: str
    body: "Command"


@dataclass(frozen=True)
class Group:
    body: "Block"


Command = Simple | Test | Calculation | Chain | If | For | ForCount | While | Case | Function | Group
Block = tuple[Command, ...]
