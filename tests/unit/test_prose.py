"""The text of the project is plain English: full sentences, few relative pronouns, short sentences."""

from pathlib import Path

import pytest

from tests.support.prose import measure, sentences, texts_of_code

REPOSITORY = Path(__file__).resolve().parents[2]
FRAGMENTS, RELATIVES, STUMBLES = 0.005, 0.18, 0.005
"""Limits: share of docstrings, number a sentence, number a sentence."""
LONG_IN_CODE, LONG_ON_PAGES = 0.005, 0.03
"""Limits: share of sentences."""


@pytest.mark.parametrize("folders", [("rltrain", "launch", "tools"), ("tests",)], ids=["code", "tests"])
def test_docstrings_and_comments_are_plain(folders: tuple[str, ...]) -> None:
    prose = measure(path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py")))
    assert prose.fragment_share <= FRAGMENTS, prose.fragments
    assert prose.relatives_per_sentence <= RELATIVES
    assert prose.long_share <= LONG_IN_CODE, prose.long
    assert prose.stumbles_per_sentence <= STUMBLES, prose.stumbles


def test_pages_are_plain() -> None:
    prose = measure([*REPOSITORY.glob("*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))])
    assert prose.relatives_per_sentence <= RELATIVES
    assert prose.long_share <= LONG_ON_PAGES, prose.long
    assert prose.stumbles_per_sentence <= STUMBLES, prose.stumbles


def test_a_riddle_is_found(tmp_path: Path) -> None:
    page = tmp_path / "riddle.py"
    page.write_text('"""What is left of those that whoever stands at hand had said of it."""\n# What goes on anew.\n')
    prose = measure([page])
    assert prose.num_docstrings == 1 and len(prose.fragments) == 1
    assert prose.relatives_per_sentence > 2 and len(prose.stumbles) >= 4


def test_texts_of_code_are_docstrings_and_comments() -> None:
    source = 'x = 1\n"""A number."""\n\n# The first\n# of two lines.\ny = "no text of ours"\n'
    assert [*texts_of_code(source)] == [(2, "A number.", True), (4, "The first\nof two lines.\n", False)]


def test_code_and_tables_are_no_sentences() -> None:
    text = "One two three. Four five six:\n\n```\nnot this one here\n```\n\n| nor | this | one |\n\n- a list entry"
    assert sentences(text) == ["One two three.", "Four five six:", "- a list entry"]
