"""Reads the words of a shell script: quotes, `$` expressions, blanks, comments, redirections."""

import re

from rltrain.errors import ConfigError
from rltrain.importing.shell_syntax import Arithmetic, Part, Substitution, Text, Variable, Word

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPECIAL = "@*#?$!-0123456789"
BREAKS = " \t\n;&|<>()"
REDIRECTION = re.compile(r"[0-9]*(?:&>>|&>|>&|<&|<<<|>>|>\||<>|>|<)")
HERE = re.compile(r"[0-9]*<<(-?)(?!<)[ \t]*(\\?)(['\"]?)([A-Za-z_0-9]+)\3")


class WordReader:
    """A cursor over a script's text."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.awaited: list[tuple[str, bool]] = []
        self.here: str | None = None

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fail(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name}:{self.line}: {what}; expected a script that the shell accepts")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def blanks(self, newlines: bool = False) -> None:
        """Go past blanks, comments and continued lines; also past ends of lines and `;` where `newlines`."""
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
        """Past the end of a line, and past the here-documents that begin behind it."""
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
        """Go past a redirection, if there is one."""
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
        """The word at the cursor; empty where there is none."""
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
        """Between `$((` and `))`; None where these are two substitutions."""
        start = self.at
        self.at += 2
        inside = self._balanced("(", ")")
        if inside.startswith("(") and inside.endswith(")"):
            return inside[1:-1]
        self.at = start
        return None

    def _balanced(self, opening: str, closing: str) -> str:
        """Up to the bracket that closes the one before the cursor, which ends behind it."""
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
        """Between `((` and `))`, the cursor behind the first."""
        inside = self._balanced("(", ")")
        if not self.take(")"):
            raise self.fail("(( is not closed by ))")
        return inside

    def _find(self, char: str, start: int | None = None) -> int:
        end = self.text.find(char, self.at if start is None else start)
        if end < 0:
            raise self.fail(f"a {char} is not closed")
        return end
