"""Measures how plainly the docstrings, comments and pages are written.

    python -m tests.support.prose PATH...     # prints the measures, then the sentences to rewrite

Sentences in code blocks and tables are not counted.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FRAGMENT = re.compile(
    r"(What|Of|Those|Whose|As|By|So|Where|In which|How|For whom|With which|All that|None of|Behind|Beside)\b"
    r"|\w+Error where\b"
)
"""Beginnings of docstrings without subject and verb."""
RELATIVE = re.compile(r"\b(which|whose|whom|that|those|what|whoever|whatever|wherever)\b", re.IGNORECASE)
STUMBLE = re.compile(
    r"\b(whoever|whatever|behind it|beside (it|them|others)|besides|aside|thereof|thereby|foretell\w*|foretold|told of"
    r"|said of|goes on|go on|in the place of|of (its|their) own|all but|lies? on|stands? (in|for|at)|dealt out"
    r"|as (it is|they are)|at hand|anew|lest|save for)\b",
    re.IGNORECASE,
)
LONG_WORDS = 30


@dataclass
class Prose:
    """The measures of some texts."""

    num_docstrings: int = 0
    num_sentences: int = 0
    num_relatives: int = 0
    fragments: list[str] = field(default_factory=list)
    """Docstrings that begin like FRAGMENT, each with its place."""
    long: list[str] = field(default_factory=list)
    """Sentences of more than LONG_WORDS words, each with its place."""
    stumbles: list[str] = field(default_factory=list)
    """Sentences with an expression of STUMBLE, once for each, with their places."""

    def add(self, place: str, text: str, *, is_docstring: bool = False) -> None:
        """Counts the sentences of `text`."""
        self.num_docstrings += is_docstring
        if is_docstring and FRAGMENT.match(text.strip()):
            self.fragments.append(f"{place}: {text.strip()[:100]}")
        for sentence in sentences(text):
            said = f"{place}: {sentence[:160]}"
            self.num_sentences += 1
            self.num_relatives += len(RELATIVE.findall(sentence))
            self.long += [said] * (len(sentence.split()) > LONG_WORDS)
            self.stumbles += [said] * len(STUMBLE.findall(sentence))

    @property
    def fragment_share(self) -> float:
        return len(self.fragments) / max(1, self.num_docstrings)

    @property
    def relatives_per_sentence(self) -> float:
        return self.num_relatives / max(1, self.num_sentences)

    @property
    def long_share(self) -> float:
        return len(self.long) / max(1, self.num_sentences)

    @property
    def stumbles_per_sentence(self) -> float:
        return len(self.stumbles) / max(1, self.num_sentences)


def measure(paths: Iterable[Path]) -> Prose:
    """Returns the measures of Python files and Markdown pages together."""
    prose = Prose()
    for path in paths:
        if path.suffix == ".py":
            for line, text, is_docstring in texts_of_code(path.read_text(encoding="utf-8")):
                prose.add(f"{path}:{line}", text, is_docstring=is_docstring)
        else:
            prose.add(str(path), path.read_text(encoding="utf-8"))
    return prose


def texts_of_code(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, whether it is a docstring) for docstrings and comments.

    A text after an attribute counts as a docstring. Consecutive comment lines are one text.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
    for match in re.finditer(r"(?:^ *# (?!noqa|type:).*\n)+", source, re.MULTILINE):
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"^ *# ", "", match[0], flags=re.MULTILINE), False


def sentences(text: str) -> list[str]:
    """Returns the sentences of at least three words, without code blocks, tables and calls."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("|", ">>>", "$", "    ")))
    text = re.sub(r"`[^`]*`", "X", "\n".join(lines))
    parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z(X])|\n\s*\n|\n\s*[-*] ", text)
    return [part.strip() for part in parts if len(part.split()) >= 3]


def main(paths: list[Path]) -> None:
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.*")))]
    prose = measure(file for file in files if file.suffix in (".py", ".md"))
    print(
        f"fragments {prose.fragment_share:.1%}, relative pronouns a sentence {prose.relatives_per_sentence:.2f}, "
        f"long sentences {prose.long_share:.1%}, stumbles a sentence {prose.stumbles_per_sentence:.3f}"
    )
    print(*prose.fragments, *prose.long, *prose.stumbles, sep="\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
