"""Texts as a model reads them that has a tokenizer and chat template of its own."""

from pathlib import Path
from typing import Any

import pytest

from rltrain.errors import CheckpointError
from rltrain.roles.scoring_models import OwnText, UnreadableTextError
from tests.forked.popen import REPOSITORY

SAID = [{"role": "assistant", "content": "3"}]
REFUSES = "{{ raise_exception('only one message') }}"
SHOWS = "{% for m in messages %}{{ m.content }}={% endfor %}{% if add_generation_prompt %}+{% endif %}"


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """Makes one of the template and vocabulary."""

    def make(template: str | None = None, vocab_size: int = 1000, chat_template: str = "auto") -> OwnText:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "tests/warmed_up")
        tokenizer.chat_template = template
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        tokenizer.save_pretrained(folder)
        return OwnText(folder, "judge.path", vocab_size=vocab_size, chat_template=chat_template)

    return make


def test_a_template_writes_the_whole_conversation(own: Any) -> None:
    text = own(SHOWS)
    ids = text.ids("1+2", [], SAID)
    assert text.tokenizer.decode(ids).replace(" ", "") == "1+2=3="
    asked = text.ids("unused", [{"role": "system", "content": "9"}, {"role": "user", "content": "1+2"}], SAID)
    assert text.tokenizer.decode(asked).replace(" ", "") == "9=1+2=3="
    assert text.tokenizer.decode(text.question_ids("3")).replace(" ", "") == "3=+"


@pytest.mark.parametrize("template", [None, SHOWS])
def test_without_a_template_texts_stand_one_after_the_other(own: Any, template: str | None) -> None:
    text = own(template, chat_template="never")
    assert text.ids("1+2=", [], SAID) == list(text.tokenizer("1+2=3")["input_ids"])
    assert text.question_ids("1+2=") == list(text.tokenizer("1+2=")["input_ids"])


def test_what_cannot_be_read_is_told(own: Any, tmp_path: Path) -> None:
    with pytest.raises(UnreadableTextError, match="refuses the conversation: only one message"):
        own(REFUSES).ids("1", [], SAID)
    with pytest.raises(UnreadableTextError, match="refuses the question: only one message"):
        own(REFUSES).question_ids("1")
    with pytest.raises(UnreadableTextError, match="and the model's vocabulary has 2"):
        own(vocab_size=2).ids("1", [], SAID)
    with pytest.raises(UnreadableTextError, match="the text has no token"):
        own().ids("", [], [])
    with pytest.raises(CheckpointError, match="judge.path: there is no folder"):
        OwnText(tmp_path / "nowhere", "judge.path", vocab_size=9, chat_template="auto")


def test_a_text_may_be_made_to_end_with_eos(own: Any) -> None:
    text = own()
    eos = text.eos
    assert text.up_to_eos([5, 6]) == [5, 6, eos]
    assert text.up_to_eos([5, eos, 6, eos, 7, 8]) == [5, eos, 6, eos]
    assert text.up_to_eos([5, eos]) == [5, eos]
    text.tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="judge.path: the tokenizer has no eos_token"):
        text.up_to_eos([5])


def test_an_answer_ends_as_the_tokenizer_says(own: Any) -> None:
    text = own(SHOWS)
    assert text.tokenizer.eos_token_id in text.end_tokens
