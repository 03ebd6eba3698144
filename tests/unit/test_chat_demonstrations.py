"""Written conversations of every family: what is learnt of them, and that it is what a rollout would have recorded."""

import copy
from typing import Any

import pytest

from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.prompt_rows import demonstrate
from rltrain.errors import DataError
from tests.chat_families import ADD, FAMILIES, format_of, tokenizer_of

WHOLE_IS_EXACT = ("qwen2_5", "qwen3_coder", "llama3_1", "gemma3", "phi4", "smollm3")
"""Families whose templates never change what stands before."""
TALK = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "And 2 + 2? <|im_end|>"},
    {"role": "assistant", "content": "So 4, é 𝄞."},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 3."},
]


def learnt(record: Conversation) -> list[str]:
    """The text of every turn."""
    return [str(record.format.tokenizer.decode(record.ids[begin:end])) for begin, end in record.turns]


def naive_mask(chat: ChatFormat, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of the template's rendering of the whole: an assistant's words and the token behind them."""
    text = chat.template.render(messages, generation_prompt=False)
    end = str(chat.tokenizer.convert_ids_to_tokens(chat.end.closing[-1]))
    spans, place = [], 0
    for message in messages:
        begin = text.index(message["content"], place)
        place = begin + len(message["content"])
        if message["role"] == "assistant":
            spans.append((begin, text.index(end, place) + len(end)))
    tokens = chat.tokenizer(text[: spans[-1][1]], add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(b <= first and last <= e for b, e in spans) for first, last in tokens["offset_mapping"]]
    return tokens["input_ids"], mask


@pytest.mark.parametrize("family", WHOLE_IS_EXACT)
@pytest.mark.parametrize("system", [False, True])
def test_masks_are_those_of_the_whole_rendered_once(family: str, system: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}] * system + TALK
    record = demonstrate(format_of(family), messages)
    ids, mask = naive_mask(record.format, messages)
    assert (list(record.ids), list(record.drawn_mask)) == (ids, mask)


def drawn(chat: ChatFormat, messages: list[dict[str, Any]], said: list[str]) -> Conversation:
    """What a rollout records whose engine draws the turns `said` and is answered by what stands between them."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    record = Conversation.begin(chat, messages[: places[0]])
    for number, (place, turn) in enumerate(zip(places, said, strict=True)):
        record = record.drawn(chat.template.encode(turn))
        if number + 1 < len(places):
            record = record.observed(messages[place + 1 : places[number + 1]])
    return record


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_r1"])
def test_a_demonstration_is_what_a_rollout_would_have_recorded(family: str) -> None:
    talks = [(TALK, ())] + ([(TOOL_TALK, (ADD,))] if "tool" in FAMILIES[family].takes and family != "phi4" else [])
    for messages, tools in talks:
        record = demonstrate(format_of(family, tools), messages)
        said = learnt(record)
        assert all(record.ids[end - 1] in record.format.end_tokens for _, end in record.turns)
        again = drawn(record.format, messages, said)
        assert (record.ids, record.turns) == (again.ids, again.turns)
    assert "add" in said[0] or len(talks) == 1, "a turn that calls a tool is learnt with its call"
    assert not any("3</" in text for text in said), "results are not"


GLM_MARKS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TEMPLATE = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def glm_format(*end_tokens: str) -> ChatFormat:
    """A template whose turns end with the mark of the next message, as GLM-4's do."""
    tokenizer = copy.deepcopy(tokenizer_of("phi4"))
    tokenizer.add_special_tokens({"eos_token": GLM_MARKS[0], "additional_special_tokens": [*GLM_MARKS[1:]]})
    tokenizer.chat_template = GLM_TEMPLATE
    return ChatFormat(tokenizer, end_tokens=[tokenizer.convert_tokens_to_ids(token) for token in end_tokens])


def test_the_mark_of_the_next_message_ends_a_turn_that_the_template_does_not_end() -> None:
    chat = glm_format("<|endoftext|>", "<|user|>", "<|observation|>")
    messages = [TALK[0], {**TOOL_TALK[1], "content": "So "}, *TOOL_TALK[2:], *TALK[2:]]
    record = demonstrate(chat, messages)
    said = learnt(record)
    assert said == ["So add<|observation|>", "It is 3.<|user|>", "So 4, é 𝄞.<|user|>"]
    whole = chat.template.render(messages, generation_prompt=False)
    assert chat.tokenizer.decode(record.ids) == whole + "<|user|>"
    again = drawn(chat, messages, said)
    assert (record.ids, record.turns) == (again.ids, again.turns)
    assert chat.tokenizer.convert_ids_to_tokens([chat.end.last]) == ["<|user|>"]
    called = demonstrate(chat, messages[:2])
    assert learnt(called) == ["So add<|observation|>"]


def test_without_end_tokens_among_the_marks_the_tokenizers_ends_a_turn() -> None:
    record = demonstrate(glm_format(), TALK)
    assert learnt(record) == ["The answer is 3.<|endoftext|>", "So 4, é 𝄞.<|endoftext|>"]
    assert "3.<|endoftext|><|user|>\nAnd" in record.format.tokenizer.decode(record.ids)


def test_reasoning_of_every_turn_is_learnt_though_the_template_drops_it() -> None:
    """Rendered as a whole Qwen3's earlier turns have none; the model that drew them had."""
    messages = [dict(message) for message in TALK]
    for number in (1, 3):
        messages[number]["content"] = f"<think>\nthought{number}\n</think>\n\n{messages[number]['content']}"
    record = demonstrate(format_of("qwen3"), messages)
    assert [f"thought{number}" in text for number, text in zip((1, 3), learnt(record), strict=True)] == [True, True]
    whole = record.format.template.render(messages, generation_prompt=False)
    assert "thought1" not in whole and "thought3" in whole


@pytest.mark.parametrize("apart", [False, True])
def test_reasoning_that_the_prompt_begins(apart: bool) -> None:
    thought = {"reasoning_content": "so", "content": "3"} if apart else {"content": "<think>\nso\n</think>\n\n3"}
    record = demonstrate(format_of("deepseek_r1"), [TALK[0], {"role": "assistant", **thought}])
    assert learnt(record) == ["so\n</think>\n\n3<｜end▁of▁sentence｜>"]
    assert record.format.tokenizer.decode(record.ids[: record.turns[0][0]]).endswith("<｜Assistant｜><think>\n")


def test_a_turn_without_the_reasoning_that_the_prompt_begins_is_refused() -> None:
    with pytest.raises(DataError, match=r"asks the model to go on from '.*<think>\\n' and renders the turn 'The answ"):
        demonstrate(format_of("deepseek_r1"), TALK)


def test_roles_that_the_template_refuses() -> None:
    twice = [TALK[0], TALK[0], TALK[1]]
    with pytest.raises(DataError, match="the chat template refuses messages of roles user, user"):
        demonstrate(format_of("gemma3"), twice)
