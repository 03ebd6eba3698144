"""Tests of the incremental encoding of conversations by chat templates."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rltrain.data.chat_format import ChatFormat, Conversation
from rltrain.data.tokenizer import TextDecoder
from rltrain.environments.interface import ToolCall
from rltrain.errors import ConfigError, DataError
from tests.support.chat_families import ADD, FAMILIES, TOOLS, format_of, tokenizer_of

USER = ({"role": "user", "content": "And now?"},)


def result(content: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": call_id, "content": content}


def ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
    return chat.template.encode(text)


def continued(chat: ChatFormat, turn: str, *messages: Any) -> str:
    return str(chat.tokenizer.decode(chat.continuation(ids(chat, turn), messages).ids))


CLOSING_AND_USER = {
    **dict.fromkeys(
        ("qwen2_5", "qwen3", "qwen3_coder", "smollm3"),
        ("<|im_end|>", "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"),
    ),
    "llama3_1": (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral_nemo": ("</s>", "[INST]And now?[/INST]"),
    "gemma3": ("<end_of_turn>", "\n<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n"),
    "deepseek_r1": ("<｜end▁of▁sentence｜>", "<｜User｜>And now?<｜Assistant｜><think>\n"),
    "phi4": ("<|im_end|>", "<|im_start|>user<|im_sep|>And now?<|im_end|><|im_start|>assistant<|im_sep|>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_gets_what_it_lacks_of_its_closing(family: str) -> None:
    closing, following = CLOSING_AND_USER[family]
    chat = format_of(family)
    assert continued(chat, f"4{closing}", *USER) == following
    assert continued(chat, "4", *USER) == closing + following, "a limit cut the turn"
    for other in (*FAMILIES[family].end_tokens, FAMILIES[family].eos):
        assert continued(chat, f"4{other}", *USER) == following, "another end token of the model replaces it"


QWENS = (("qwen2_5", ""), ("qwen3", ""), ("qwen3_coder", "\n"))
QWENS_RESULTS = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>"
RESULTS = {
    **{family: ("<|im_end|>", f"{QWENS_RESULTS}{end}<|im_end|>\n<|im_start|>assistant\n") for family, end in QWENS},
    "llama3_1": (
        "<|eom_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral_nemo": (
        "</s>",
        '[TOOL_RESULTS]{"content": "3", "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "7", "call_id": "call00002"}[/TOOL_RESULTS]',
    ),
    "deepseek_r1": (
        "<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
}


@pytest.mark.parametrize("family", RESULTS)
def test_results_of_tools_follow_a_turn_together(family: str) -> None:
    closing, following = RESULTS[family]
    chat = format_of(family, TOOLS)
    assert continued(chat, f"calls{closing}", result("3"), result("7", "call00002")) == following


def test_a_result_that_does_not_name_its_call_is_given_an_id() -> None:
    chat = format_of("mistral_nemo", TOOLS)
    following = continued(chat, "calls</s>", {"role": "tool", "content": "3"})
    assert following == '[TOOL_RESULTS]{"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]'


def test_what_follows_is_encoded_by_itself() -> None:
    """The turn ends in the first half of a token. The template continues with the second half."""
    chat = ChatFormat(tokenizer_with("{% for m in messages %}{{ m.content }}\n\n{% endfor %}"))
    newline, both = ids(chat, "\n"), ids(chat, "\n\n")
    assert len(newline) == len(both) == 1 and newline != both
    following = chat.continuation(newline, USER).ids
    assert following == ids(chat, "\n\nAnd now?\n\n"), "no part of the turn was decoded"


def tokenizer_with(template: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("phi4").backend_tokenizer, eos_token=eos, chat_template=template
    )


def test_a_closing_of_several_tokens() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_sep|><|im_end|>\n{% endfor %}"
    chat = ChatFormat(tokenizer_with(source))
    following = "\n<|im_start|>And now?<|im_sep|><|im_end|>\n"
    assert chat.end_tokens == set(ids(chat, "<|im_end|>")), "an engine would continue after the first of several"
    assert continued(chat, "4<|im_sep|><|im_end|>", *USER) == following
    assert continued(chat, "4<|im_end|>", *USER) == following
    assert continued(chat, "4", *USER) == "<|im_sep|><|im_end|>" + following


def test_turns_that_are_ended_by_what_begins_the_next_message() -> None:
    """GLM models end a turn with the first token of the next message. This token differs for user and tool."""
    source = (
        "{% for m in messages %}{{ {'user': '<|im_start|>', 'tool': '<|im_sep|>'}[m.role] | default('<|im_end|>')}}"
    )
    chat = ChatFormat(tokenizer_with(source + "{{ m.content }}{% endfor %}", eos="<|endoftext|>"))
    ends = ids(chat, "<|im_start|><|im_sep|>")
    chat = ChatFormat(chat.tokenizer, end_tokens=ends)
    assert chat.end_tokens == {*ends, *ids(chat, "<|endoftext|>")}
    assert continued(chat, "4<|im_start|>", *USER) == "And now?"
    assert continued(chat, "4<|im_sep|>", result("3")) == "3"
    assert continued(chat, "4<|im_sep|>", *USER) == "<|im_start|>And now?", "it expected a tool"


@pytest.mark.parametrize(
    ("family", "tools", "options", "user", "tool"),
    [
        ("qwen2_5", TOOLS, {}, "exact", "exact"),
        ("qwen3_coder", TOOLS, {}, "exact", "exact"),
        ("llama3_1", (ADD,), {}, "exact", "exact"),
        ("phi4", (), {}, "exact", "exact"),
        ("smollm3", TOOLS, {}, "exact", "exact"),
        ("qwen3", TOOLS, {}, "appended", "exact"),
        ("qwen3", TOOLS, {"enable_thinking": False}, "appended", "appended"),
        ("mistral_nemo", (), {}, "appended", "exact"),
        ("mistral_nemo", TOOLS, {}, "appended", "exact"),
        ("deepseek_r1", TOOLS, {}, "appended", "appended"),
        ("gemma3", (), {}, "exact", "refused"),
    ],
)
def test_what_each_template_allows(family: str, tools: Any, options: dict[str, Any], user: str, tool: str) -> None:
    found = format_of(family, tools, **options).continuability
    assert (found.user, found.tool) == (user, tool), found
    assert (found.notice is not None) == ("appended" in (user, tool))


def test_the_notice_says_what_the_template_would_render_otherwise() -> None:
    notice = format_of("qwen3").continuability.notice or ""
    assert "reasoning of earlier turns" in notice and "<think>" in notice
    notice = format_of("mistral_nemo", TOOLS).continuability.notice or ""
    assert "earlier turns" in notice and "[AVAILABLE_TOOLS]" in notice


def test_a_template_that_cannot_go_on_is_refused_by_what_it_says() -> None:
    found = format_of("gemma3").continuability
    found.require("user")
    with pytest.raises(ConfigError, match="role tool cannot follow .*roles must alternate.*Let the environment answer"):
        found.require("user", "tool")
    with pytest.raises(DataError, match="refuses messages of roles tool"):
        format_of("gemma3").continuation((1,), [result("3")])


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    for tools in (TOOLS, [named("user")]):  # the template contains the word, but not the tool
        with pytest.raises(ConfigError, match="does not write the tools"):
            format_of("phi4", tools).require_tools()
    format_of("phi4").require_tools()
    format_of("qwen2_5", [*TOOLS, named("user")]).require_tools()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("family", ["deepseek_r1", "smollm3"])
def test_messages_that_the_template_moves_to_the_front_are_refused(family: str) -> None:
    with pytest.raises(DataError, match="role system after the model's turn"):
        format_of(family).continuation((1,), [{"role": "system", "content": "New rules."}, *USER])


def test_a_template_that_does_not_write_the_models_turns_is_refused() -> None:
    chat = ChatFormat(tokenizer_with("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    assert chat.continuability.user == "refused"
    with pytest.raises(ConfigError, match="does not write the model's turn"):
        chat.continuability.require("user")


def test_no_messages_are_no_answer() -> None:
    with pytest.raises(DataError, match="no message follows"):
        format_of("qwen3").continuation((1,), [])


def test_calls_of_a_prompt_are_given_as_the_template_takes_them() -> None:
    """OpenAI clients write arguments as text. Most templates need an object, DeepSeek's needs the text."""
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result("1"),
    ]
    for family in RESULTS:
        text = format_of(family, TOOLS).template.render(messages)
        assert "1 + 1?" in text and '"a' in text.replace("<parameter=a>\n1", '"a'), family
        assert '\\"a' not in text, family


def test_a_text_that_contains_the_placeholder_is_no_trouble() -> None:
    chat = format_of("qwen2_5")
    message = {"role": "user", "content": "rltrainsturn rltrainsturnx"}
    expected = "\n<|im_start|>user\nrltrainsturn rltrainsturnx<|im_end|>\n<|im_start|>assistant\n"
    assert continued(chat, "4<|im_end|>", message) == expected


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
    spelled = [token for letter in "<|im_start|>" for token in ids(chat, letter)]
    call = ids(chat, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>')
    said = chat.message_of([*spelled, *ids(chat, "<|im_start|> so"), *call])
    assert said.content == said.text == "<|im_start|> so"
    assert said.tool_calls[0].name == "add"


def test_reasoning_stands_apart() -> None:
    chat = format_of("qwen3", TOOLS)
    said = chat.message_of(ids(chat, "<think>\nOne and one.\n</think>\n\nIt is 2.<|im_end|>"))
    assert (said.reasoning, said.content) == ("One and one.", "It is 2.")
    assert said.text == "<think>\nOne and one.\n</think>\n\nIt is 2."
    assert said.message() == {"role": "assistant", "content": "It is 2.", "reasoning_content": "One and one."}
    assert chat.message_of(ids(chat, "2<|im_end|>")).reasoning is None
    cut = chat.message_of(ids(chat, "<think>\nOne and"))
    assert (cut.reasoning, cut.content, cut.ended) == ("One and", "", False)


def test_reasoning_that_the_prompt_began() -> None:
    chat = format_of("deepseek_r1")
    said = chat.message_of(ids(chat, "One and one.\n</think>\n\nIt is 2.<｜end▁of▁sentence｜>"))
    assert (said.reasoning, said.content) == ("One and one.", "It is 2.")
    cut = chat.message_of(ids(chat, "One and"))
    assert (cut.reasoning, cut.content) == ("One and", "")


def test_calls_in_thoughts_are_none() -> None:
    chat = format_of("qwen3", TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = chat.message_of(ids(chat, f"<think>\nI might {call}.\n</think>\n\nNo.<|im_end|>"))
    assert not said.tool_calls and said.content == "No."
    said = chat.message_of(ids(chat, f"<think>\nHm.\n</think>\n\nSo:\n{call}<|im_end|>"))
    assert said.tool_calls == (ToolCall("add", {"a": 1}, said.tool_calls[0].id),)
    assert said.text == "<think>\nHm.\n</think>\n\nSo:\n" and said.reasoning == "Hm."


def test_without_tools_nothing_is_a_call() -> None:
    call = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    chat = format_of("llama3_1")
    drawn, named = ids(chat, call), ChatFormat(chat.tokenizer, tool_parser="llama3_json")
    assert format_of("llama3_1", TOOLS).message_of(drawn).tool_calls and named.message_of(drawn).tool_calls
    assert chat.message_of(drawn).text == call.removesuffix("<|eot_id|>")


def test_calls_get_ids_that_every_template_takes() -> None:
    chat = format_of("qwen3", TOOLS)
    tokens = ids(chat, '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2 + "<|im_end|>")
    first, second = chat.message_of(tokens, mark=0), chat.message_of(tokens, mark=1)
    made = [call.id for call in (*first.tool_calls, *second.tool_calls)]
    assert len(set(made)) == 4 and all(len(id) == 9 and id.isalnum() for id in made)
    assert chat.message_of(tokens, mark=0) == first
    again = chat.message_of(tokens, mark=0, taken_ids=made[:1]).tool_calls
    assert again[0].id == made[1] and again[1].id not in made


def test_an_id_that_the_model_wrote_is_kept_where_templates_take_it_and_no_other_call_has_it() -> None:
    chat = format_of("mistral_nemo", TOOLS)
    told = ("abcdefgh1", "abcdefgh1", "short", "abcdefgh2")
    calls = ", ".join(f'{{"name": "add", "arguments": {{}}, "id": "{id}"}}' for id in told)
    said = chat.message_of(ids(chat, f"[TOOL_CALLS][{calls}]</s>"), taken_ids=["abcdefgh2"]).tool_calls
    assert said[0].id == "abcdefgh1" and not {said[1].id, said[2].id, said[3].id} & {*told}
    assert len({call.id for call in said}) == 4 and all(len(call.id) == 9 for call in said)


def seen(family: str = "qwen3") -> Conversation:
    chat = format_of(family, TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    asked = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "1 + 2?"}]
    talk = Conversation.begin(chat, asked).drawn(ids(chat, f"<think>\nAdd.\n</think>\n\n{call}"))
    id = talk.messages[-1]["tool_calls"][0]["id"]
    talk = talk.observed([{"role": "tool", "tool_call_id": id, "content": "3"}])
    return talk.drawn(ids(chat, "<think>\nEasy.\n</think>\n\nIt is 3. <|im_end|>"))


NEXT = {"role": "user", "content": "Thanks."}


def sent(talk: Conversation) -> list[dict[str, Any]]:
    return [*copy.deepcopy([dict(message) for message in talk.messages]), dict(NEXT)]


def test_a_client_that_sends_back_what_it_got_goes_on() -> None:
    talk = seen()
    assert talk.format.extends(talk, sent(talk)) == (NEXT,)
    assert talk.format.extends(talk, [*sent(talk), NEXT]) == (NEXT, NEXT)


CHANGES: dict[str, Any] = {
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


@pytest.mark.parametrize("change", CHANGES)
def test_what_clients_drop_or_write_otherwise_goes_on(change: str) -> None:
    talk = seen()
    messages = sent(talk)
    CHANGES[change](messages)
    assert talk.format.extends(talk, messages) == (NEXT,)


DIFFERENCES: dict[str, Any] = {
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


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_anything_else_branches(difference: str) -> None:
    talk = seen()
    messages = sent(talk)
    DIFFERENCES[difference](messages)
    assert talk.format.extends(talk, messages) is None


def test_a_request_that_is_not_answered_yet_is_not_gone_on_from() -> None:
    talk = seen()
    waiting = talk.observed([NEXT])
    assert talk.format.extends(waiting, sent(talk)) is None
    assert talk.format.extends(waiting, [*sent(talk), NEXT]) is None


def test_a_message_that_the_template_cannot_append_branches() -> None:
    chat = format_of("deepseek_r1")
    talk = Conversation.begin(chat, [NEXT]).drawn(ids(chat, "</think>Yes.<｜end▁of▁sentence｜>"))
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


IN_EACH_RUN = 20
ALTOGETHER = 10_000

WORDS = ("the", "answer", "is", "42", "or", "é", "𝄞", "not", "{a: 1}", "<b>", "the\n\nresult.", "So;", "really?")
PROMPT_WORDS = (*WORDS, "", " ", "\n", "<|im_end|>", "</s>", "[INST]", "<think>", "</think>", "\u200b", "\x00")
"""Words of users and tools. Some contain special tokens, as any text in a template may."""


@dataclass
class Engine:
    """An engine with all given and generated tokens in a log, like keys and values. A request must extend this log."""

    random: random.Random
    log: list[int] = field(default_factory=list)
    drew: list[bool] = field(default_factory=list)

    def generate(self, request: Sequence[int], turn: Sequence[int]) -> None:
        assert list(request[: len(self.log)]) == self.log, "the request changes earlier tokens"
        given = request[len(self.log) :]
        assert given, "the request adds nothing to the last turn"
        self.log += [*given, *turn]
        self.drew += [False] * len(given) + [True] * len(turn)


class Script:
    """A random model and random answers to it. `messages` has the whole conversation."""

    def __init__(self, family: str, seed: int) -> None:
        self.random = random.Random(f"{family} {seed}")
        self.family = FAMILIES[family]
        tools = TOOLS if "tool" in self.family.takes and family != "phi4" and self.random.random() < 0.7 else ()
        self.chat = FORMATS[family, bool(tools)]
        self.tools = tools
        self.plain = self.random.random() < 0.5
        """True if the model generates only text of its template, with the ids of its tokenizer."""
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.words(PROMPT_WORDS)}]
        if self.random.random() < 0.5:
            self.messages.insert(0, {"role": "system", "content": self.words(WORDS)})

    def words(self, words: Sequence[str]) -> str:
        return " ".join(self.random.choices(words, k=self.random.randint(1, 6)))

    def turn(self) -> tuple[int, ...]:
        """Adds the next message and returns the ids of its turn. Only a plain model keeps to the message's text."""
        calls = [self.call() for _ in range(self.random.randint(1, 2 if self.family.parallel_calls else 1))]
        if self.tools and self.random.random() < 0.5:
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        else:
            message = {"role": "assistant", "content": self.words(WORDS)}
        self.messages.append(message)
        if self.plain:
            return self.as_written(message)
        kind = self.random.choice((self.as_written, self.cut, self.any_ids, self.bytes, self.spelled, self.other_end))
        return kind(message)

    def call(self) -> dict[str, Any]:
        id = "".join(self.random.choices("abcdefgh0123", k=9))
        arguments = {"a": self.random.randint(-9, 9), "query": self.words(WORDS)}
        return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    def as_written(self, message: dict[str, Any]) -> tuple[int, ...]:
        """Returns the ids of the turn through its end token, in the template's form for earlier messages."""
        end = str(self.chat.tokenizer.convert_ids_to_tokens(self.chat.end.closing[-1]))
        if not message.get("tool_calls"):
            return self.chat.template.encode(message["content"] + end)
        asked = self.chat.template.render([USER_TURN])
        answered = self.chat.template.render([USER_TURN, message, RESULT])
        drawn = answered.removeprefix(asked.removesuffix("<think>\n"))
        return self.chat.template.encode(drawn[: drawn.index(end)] + end)

    def cut(self, message: dict[str, Any]) -> tuple[int, ...]:
        whole = self.as_written(message)
        return whole[: self.random.randint(1, len(whole))]

    def any_ids(self, message: dict[str, Any]) -> tuple[int, ...]:
        return tuple(self.random.choices(range(len(self.chat.tokenizer)), k=self.random.randint(1, 12)))

    def bytes(self, message: dict[str, Any]) -> tuple[int, ...]:
        """Returns ids with bytes of no valid UTF-8 text."""
        letters = [token for letter in "é𝄞ü" for token in self.chat.template.encode(letter)]
        return tuple(self.random.choices(letters, k=self.random.randint(1, 5)))

    def spelled(self, message: dict[str, Any]) -> tuple[int, ...]:
        """Returns the ids of a special token's letters, perhaps with an end token after them."""
        text = self.random.choice([*self.family.special, *self.family.visible])
        letters = [token for letter in text for token in self.chat.template.encode(letter)]
        return (*letters, *self.random.choices(sorted(self.chat.end_tokens), k=self.random.randint(0, 1)))

    def other_end(self, message: dict[str, Any]) -> tuple[int, ...]:
        return (*self.as_written(message)[:-1], self.random.choice(sorted(self.chat.end_tokens)))

    def answer(self) -> list[dict[str, Any]]:
        calls = self.messages[-1].get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.words(PROMPT_WORDS)} for call in calls]
        answer = results or [{"role": "user", "content": self.words(PROMPT_WORDS)}]
        self.messages += answer
        return answer


USER_TURN = {"role": "user", "content": "."}
RESULT = {"role": "tool", "content": ".", "tool_call_id": "call00000"}
FORMATS: dict[tuple[str, bool], ChatFormat] = {
    (family, bool(tools)): format_of(family, tools) for family in FAMILIES for tools in ((), TOOLS)
}
WHOLE_IS_EXACT = ("qwen2_5", "qwen3_coder", "llama3_1", "gemma3", "phi4", "smollm3")
"""Families with templates that never change earlier text. Qwen3's and Mistral's change it in some conversations."""


def rendered(script: Script, spoken: Sequence[dict[str, Any]] = ()) -> str:
    """Returns the template's text of the whole conversation, or of `spoken` through the end of a turn of the model."""
    messages, options = list(spoken) or script.messages, {"add_generation_prompt": not spoken, "tokenize": False}
    return str(script.chat.tokenizer.apply_chat_template(messages, tools=list(script.tools) or None, **options))


def play(family: str, seed: int) -> bool:
    """Plays a conversation. Returns whether it was compared with the template's text of the whole."""
    script = Script(family, seed)
    engine = Engine(script.random)
    talk = Conversation.begin(script.chat, script.messages)
    turns = []
    for _ in range(script.random.randint(1, 3)):
        turn = script.turn()
        engine.generate(talk.ids, turn)
        turns.append(turn)
        talk = talk.drawn(turn)
        assert list(talk.ids) == engine.log and list(talk.drawn_mask) == engine.drew
        spoken = list(script.messages)
        talk = talk.observed(script.answer())
        if family in WHOLE_IS_EXACT and not script.plain:
            following = script.chat.tokenizer.decode(talk.ids[len(engine.log) :])
            assert following.endswith(rendered(script).removeprefix(rendered(script, spoken))), (
                "the whole equals the template, for any turn"
            )
    assert [talk.ids[begin:end] for begin, end in talk.turns] == turns
    assert [message["role"] for message in talk.messages] == [message["role"] for message in script.messages]
    answers = [message for message in talk.messages if message["role"] in ("user", "tool", "system")]
    assert answers == [message for message in script.messages if message["role"] != "assistant"]
    if not script.plain or family not in WHOLE_IS_EXACT:
        return False
    whole = script.chat.tokenizer.apply_chat_template(
        script.messages, tools=list(script.tools) or None, add_generation_prompt=True, return_dict=False
    )
    assert list(talk.ids) == whole
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_is_what_the_engine_was_given_and_drew(family: str) -> None:
    compared = [play(family, seed) for seed in range(IN_EACH_RUN)]
    assert any(compared) == (family in WHOLE_IS_EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_conversations(family: str) -> None:
    """Expects no difference between the records and the engine's log, over all families together."""
    for seed in range(-(-ALTOGETHER // len(FAMILIES))):
        play(family, 1000 + seed)
