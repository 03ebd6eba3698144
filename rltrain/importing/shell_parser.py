"""Reads a shell script into a tree of commands."""

import re
from collections.abc import Collection
from dataclasses import replace

from rltrain.importing.shell_syntax import (
    Assignment,
    Block,
    Calculation,
    Case,
    Chain,
    Command,
    For,
    ForCount,
    Function,
    Group,
    If,
    Simple,
    Test,
    Text,
    While,
    Word,
)
from rltrain.importing.shell_words import BREAKS, WordReader

ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([^]]*)\])?(\+?)=")
DECLARED = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*(?=[{(])")
KEYWORD = re.compile(r"(if|then|elif|else|fi|for|while|until|do|done|case|esac)(?=[\s;()&|]|$)")
DECLARING = ("export", "local", "declare", "readonly", "typeset")


def parse_script(text: str, name: str) -> Block:
    """ConfigError with `name` and the line where the text is no script."""
    parser = _Parser(text, name)
    block = parser.block(())
    if parser.at < len(text):
        raise parser.fail(f"{text[parser.at : parser.at + 10]!r} has no beginning")
    return block


class _Parser(WordReader):
    def block(self, ends: Collection[str]) -> Block:
        """Commands up to one of `ends`, which stays."""
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
        negated = bool(re.match(r"!\s", self.text[self.at : self.at + 2]))
        if negated:
            self.at += 2
            self.blanks()
        first, rest = self.command(), []
        while True:
            self.blanks()
            operator = next((text for text in ("&&", "||", "|&", "|") if self.peek(text)), None)
            if operator is None:
                break
            self.take(operator)
            self.blanks(newlines=True)
            rest.append((operator, self.command()))
        return Chain(first, tuple(rest), negated) if rest or negated else first

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
            return Function(declared[1] or declared[2], self.command())
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
                raise self.fail("for (( )) has not three parts")
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
        """A command. What it is given by `NAME=value` before its name, or by `export NAME=value`, are assignments."""
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
                raise self.fail("( stands where no list or function begins")
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
