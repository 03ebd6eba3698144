"""What a drawn turn says: text, reasoning, tool calls; and whether a client's messages go on from a conversation."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.tokenizer import TextDecoder
from rltrain.environments.interface import ToolCall
from tests.chat_families import FAMILIES, TOOLS, format_of, tokenizer_of


def turn(chat: ChatFormat, text: str) -> tuple[int, ...]:
    return chat.template.encode(text)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, derandomize=True, deadline=None)
@given(data=st.data())
def test_whatever_is_drawn_says_something(family: str, data: st.DataObject) -> None:
    chat = format_of(family, TOOLS)
    drawn = data.draw(st.lists(st.integers(0, len(chat.tokenizer) - 1), min_size=1, max_size=30))
    said = chat.message_of(drawn)
    json.dumps(said.message())
    assert said.ended == (drawn[-1] in chat.end_tokens)
    if not said.tool_calls and not said.malformed:
        content = drawn[:-1] if said.ended else drawn
        assert said.text == TextDecoder(chat.tokenizer).decode(content), "as rewards see it"


def test_special_tokens_are_no_text_but_what_looks_like_them_is() -> None:
    chat = format_of("qwen2_5", TOOLS)
    spelled = [token for letter in "<|im_start|>" for token in turn(chat, letter)]
    call = turn(chat, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>')
    said = chat.message_of([*spelled, *turn(chat, "<|im_start|> so"), *call])
    assert said.content == said.text == "<|im_start|> so"
    assert said.tool_calls[0].name == "add"


def test_reasoning_stands_apart() -> None:
    chat = format_of("qwen3", TOOLS)
    said = chat.message_of(turn(chat, "<think>\nOne and one.\n</think>\n\nIt is 2.<|im_end|>"))
    assert (said.reasoning, said.content) == ("One and one.", "It is 2.")
    assert said.text == "<think>\nOne and one.\n</think>\n\nIt is 2."
    assert said.message() == {"role": "assistant", "content": "It is 2.", "reasoning_content": "One and one."}
    assert chat.message_of(turn(chat, "2<|im_end|>")).reasoning is None
    cut = chat.message_of(turn(chat, "<think>\nOne and"))
    assert (cut.reasoning, cut.content, cut.ended) == ("One and", "", False)


def test_reasoning_that_the_prompt_began() -> None:
    chat = format_of("deepseek_r1")
    said = chat.message_of(turn(chat, "One and one.\n</think>\n\nIt is 2.<｜end▁of▁sentence｜>"))
    assert (said.reasoning, said.content) == ("One and one.", "It is 2.")
    cut = chat.message_of(turn(chat, "One and"))
    assert (cut.reasoning, cut.content) == ("One and", "")


def test_calls_in_thoughts_are_none() -> None:
    chat = format_of("qwen3", TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = chat.message_of(turn(chat, f"<think>\nI might {call}.\n</think>\n\nNo.<|im_end|>"))
    assert not said.tool_calls and said.content == "No."
    said = chat.message_of(turn(chat, f"<think>\nHm.\n</think>\n\nSo:\n{call}<|im_end|>"))
    assert said.tool_calls == (ToolCall("add", {"a": 1}, said.tool_calls[0].id),)
    assert said.text == "<think>\nHm.\n</think>\n\nSo:\n" and said.reasoning == "Hm."


def test_without_tools_nothing_is_a_call() -> None:
    call = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    assert format_of("llama3_1", TOOLS).message_of(turn(format_of("llama3_1"), call)).tool_calls
    assert format_of("llama3_1").message_of(turn(format_of("llama3_1"), call)).text == call.removesuffix("<|eot_id|>")
    assert (
        ChatFormat(tokenizer_of("llama3_1"), tool_parser="llama3_json")
        .message_of(turn(format_of("llama3_1"), call))
        .tool_calls
    )


def test_calls_get_ids_that_every_template_takes() -> None:
    chat = format_of("qwen3", TOOLS)
    tokens = turn(chat, '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2 + "<|im_end|>")
    first, second = chat.message_of(tokens, mark=0), chat.message_of(tokens, mark=1)
    made = [call.id for call in (*first.tool_calls, *second.tool_calls)]
    assert len(set(made)) == 4 and all(len(id) == 9 and id.isalnum() for id in made)
    assert chat.message_of(tokens, mark=0) == first
    again = chat.message_of(tokens, mark=0, taken_ids=made[:1]).tool_calls
    assert again[0].id == made[1] and again[1].id not in made


def test_an_id_that_the_model_wrote_is_kept_where_templates_take_it_and_no_other_call_has_it() -> None:
    chat = format_of("mistral_nemo", TOOLS)
    ids = ("abcdefgh1", "abcdefgh1", "short", "abcdefgh2")
    calls = ", ".join(f'{{"name": "add", "arguments": {{}}, "id": "{id}"}}' for id in ids)
    said = chat.message_of(turn(chat, f"[TOOL_CALLS][{calls}]</s>"), taken_ids=["abcdefgh2"]).tool_calls
    assert said[0].id == "abcdefgh1" and not {said[1].id, said[2].id, said[3].id} & {*ids}
    assert len({call.id for call in said}) == 4 and all(len(call.id) == 9 for call in said)


def seen(family: str = "qwen3") -> Conversation:
    chat = format_of(family, TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    asked = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "1 + 2?"}]
    talk = Conversation.begin(chat, asked).drawn(turn(chat, f"<think>\nAdd.\n</think>\n\n{call}"))
    id = talk.messages[-1]["tool_calls"][0]["id"]
    talk = talk.observed([{"role": "tool", "tool_call_id": id, "content": "3"}])
    return talk.drawn(turn(chat, "<think>\nEasy.\n</think>\n\nIt is 3. <|im_end|>"))


NEXT = {"role": "user", "content": "Thanks."}


def sent(talk: Conversation) -> list[dict[str, Any]]:
    return [*copy.deepcopy([dict(message) for message in talk.messages]), dict(NEXT)]


def test_a_client_that_sends_back_what_it_got_goes_on() -> None:
    talk = seen()
    assert talk.format.extends(talk, sent(talk)) == (NEXT,)
    assert talk.format.extends(talk, [*sent(talk), NEXT]) == (NEXT, NEXT)


def changes() -> dict[str, Any]:
    return {
        "no content for an empty one": lambda m: m[2].pop("content"),
        "empty content for none": lambda m: m[2].update(content=""),
        "content in parts": lambda m: m[1].update(content=[{"type": "text", "text": "1 + 2?"}]),
        "reasoning dropped": lambda m: [message.pop("reasoning_content", None) for message in m],
        "reasoning under another name": lambda m: m[4].update(reasoning=m[4].pop("reasoning_content")),
        "stripped": lambda m: m[4].update(content=m[4]["content"].strip()),
        "ids dropped": lambda m: (m[2]["tool_calls"][0].pop("id"), m[3].pop("tool_call_id")),
        "arguments written anew": lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"b":2,"a":1}'),
        "arguments as an object": lambda m: m[2]["tool_calls"][0]["function"].update(arguments={"a": 1, "b": 2}),
        "keys of other makers": lambda m: m[4].update(refusal=None, audio=None, annotations=[]),
        "a name of the tool": lambda m: m[3].update(name="add"),
        "no calls as none": lambda m: m[4].update(tool_calls=None, function_call=None),
    }


@pytest.mark.parametrize("change", changes())
def test_what_clients_drop_or_write_otherwise_goes_on(change: str) -> None:
    talk = seen()
    messages = sent(talk)
    changes()[change](messages)
    assert talk.format.extends(talk, messages) == (NEXT,)


def differences() -> dict[str, Any]:
    return {
        "another prompt": lambda m: m[1].update(content="2 + 2?"),
        "another answer": lambda m: m[4].update(content="It is 4."),
        "other reasoning": lambda m: m[4].update(reasoning_content="Hard."),
        "another role": lambda m: m[3].update(role="user"),
        "a call less": lambda m: m[2].pop("tool_calls"),
        "another argument": lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"a": 1, "b": 3}'),
        "another tool": lambda m: m[2]["tool_calls"][0]["function"].update(name="search"),
        "another result": lambda m: m[3].update(content="4"),
        "the result of another call": lambda m: m[3].update(tool_call_id="call00009"),
        "a message less": lambda m: m.pop(3),
        "a message more": lambda m: m.insert(2, {"role": "user", "content": "Well?"}),
        "nothing new": lambda m: m.pop(),
        "a picture": lambda m: m[1].update(content=[{"type": "image_url", "image_url": {"url": "data:,"}}]),
        "no role": lambda m: m[1].pop("role"),
        "calls that are none": lambda m: m[2].update(tool_calls=["add"]),
    }


@pytest.mark.parametrize("difference", differences())
def test_anything_else_branches(difference: str) -> None:
    talk = seen()
    messages = sent(talk)
    differences()[difference](messages)
    assert talk.format.extends(talk, messages) is None


def test_a_request_that_is_not_answered_yet_is_not_gone_on_from() -> None:
    talk = seen()
    waiting = talk.observed([NEXT])
    assert talk.format.extends(waiting, sent(talk)) is None
    assert talk.format.extends(waiting, [*sent(talk), NEXT]) is None


def test_a_message_that_the_template_cannot_append_branches() -> None:
    chat = format_of("deepseek_r1")
    talk = Conversation.begin(chat, [NEXT]).drawn(turn(chat, "</think>Yes.<｜end▁of▁sentence｜>"))
    assert chat.extends(talk, sent(talk)) == (NEXT,)
    rules = {"role": "system", "content": "New rules."}
    assert chat.extends(talk, [*sent(talk)[:-1], rules, NEXT]) is None


def test_a_record_never_changes() -> None:
    talk = seen()
    before = (talk.ids, talk.turns, talk.messages, talk.drawn_mask)
    first, second = talk.observed([NEXT]), talk.observed([{"role": "user", "content": "Why?"}])
    assert (talk.ids, talk.turns, talk.messages, talk.drawn_mask) == before
    assert first.ids[: len(talk.ids)] == second.ids[: len(talk.ids)] == talk.ids and first.ids != second.ids
    with pytest.raises(ValueError, match="the model speaks first"):
        first.observed([NEXT])
    with pytest.raises(ValueError, match="a turn needs"):
        talk.drawn((1,))
