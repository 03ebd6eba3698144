"""Reads the shell commands quoted in README.md, CONTRIBUTING.md and docs/.

    python -m tests.support.documented_commands     # prints the first commands of the README, one a line

A command is a line of a code block that starts one of PROGRAMS, or a whole command quoted in a sentence.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

PROGRAMS = {"bash", "mkdocs", "pip", "python", "python3", "rltrain", "sbatch", "torchrun", ".venv/bin/pre-commit"}
BEFORE = re.compile(r"^(\$ |# or: )?([A-Z_]+=\S+ )*")
"""Prompt and variables allowed in front of a program."""

FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
WHOLE = re.compile(r"--config |--checkpoint |=|^(?:python|rltrain) .*\b[A-Z]{3,}$")
"""Marks a quoted command meant to be typed. Other quotes only mention a command."""
INDENTED = re.compile(r"(?<=\n\n)((?: {4}\S.*\n)+)")
SHELLS = {"", "bash", "sh", "shell", "console"}


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    def words(self) -> list[str]:
        """Returns the words of the command without comments, brackets of optional parts, "..." and everything after
        ">"."""
        words = shlex.split(re.sub(r"[\[\]]|\.\.\.(?=\s|\]|$)", " ", self.text), comments=True)
        return words[: words.index(">")] if ">" in words else words

    @property
    def makes(self) -> str | None:
        """The file after ">", or None."""
        words = shlex.split(self.text, comments=True)
        return words[words.index(">") + 1] if ">" in words else None


def blocks(page: Path) -> Iterator[str]:
    """Yields the code blocks of a page that may be for a shell."""
    text = page.read_text()
    yield from (block for language, block in FENCE.findall(text) if language in SHELLS)
    yield from (re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(FENCE.sub("", text)))


def program_of(line: str) -> str | None:
    """Returns the program that a line starts, or None if it is not one of PROGRAMS."""
    first = BEFORE.sub("", line).split(" ")[0]
    return first if first in PROGRAMS else None


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        yield from commands_of(block, page)
    for span in SPAN.findall(FENCE.sub("", page.read_text())):
        if WHOLE.search(span):
            yield from commands_of(span.replace("\n", " "), page)


def commands_of(block: str, page: Path) -> Iterator[Command]:
    name = page.relative_to(REPOSITORY).as_posix()
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        if program_of(line):
            yield Command(name, BEFORE.sub("", line))


def first_commands(page: Path) -> list[str]:
    """Returns the commands of the first block with commands, without their comments."""
    found = ([" ".join(command.words()) for command in commands_of(block, page)] for block in blocks(page))
    return next(filter(None, found))


if __name__ == "__main__":
    print(*first_commands(REPOSITORY / "README.md"), sep="\n")
