"""Tests of the tool calls of each model family."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.data.assistant_turn import PARSERS, ParsedCalls, parser_by_name, parser_of
from rltrain.environments.interface import ToolCall
from rltrain.errors import ConfigError
from tests.support.chat_families import ADD, FAMILIES, SEARCH, TOOLS, format_of, tokenizer_of

WRITES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "smollm3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_1": "llama3_json",
    "mistral_nemo": "mistral",
    "deepseek_r1": "deepseek",
}


def parse(parser: str, text: str) -> ParsedCalls:
    return PARSERS[parser](text, TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_tells_what_its_model_writes(family: str) -> None:
    assert parser_of(str(tokenizer_of(family).chat_template)) == WRITES.get(family)


def test_a_parser_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no parser of tool calls named 'herms'.*hermes, qwen3_coder"):
        parser_by_name("herms")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab\n"{}é𝄞\\'),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.sampled_from("kl"), inside, max_size=2),
    max_leaves=4,
)

MARKS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>", "[TOOL_CALLS]"),
    *(
        "<|python_tag|>",
        "```",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
)
marked_texts = st.lists(st.sampled_from(MARKS), max_size=4).map(" and ".join)
"""Texts with marks of tool calls in them."""


@pytest.mark.parametrize("family", WRITES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(data=st.data())
def test_what_a_template_writes_of_calls_is_read_back(family: str, data: st.DataObject) -> None:
    """Parses calls in the form of the template, with special tokens as ids."""
    chat = format_of(family, TOOLS)
    queries = st.text("abc \n\"{}'é") | marked_texts
    one = st.builds(
        ToolCall,
        name=st.sampled_from(["add", "search"]),
        arguments=st.fixed_dictionaries({"a": st.integers(), "query": queries, "other": values}),
        id=st.text("abcdefghi0", min_size=9, max_size=9),
    )
    calls = data.draw(st.lists(one, min_size=1, max_size=3 if FAMILIES[family].parallel_calls else 1))
    if family == "qwen3_coder":  # only parameters declared as text are not parsed as JSON
        calls = [ToolCall("search", {"query": call.arguments["query"]}, call.id) for call in calls]
    asked = {"role": "user", "content": "Go."}
    answer = {"role": "assistant", "content": None, "tool_calls": [as_openai(call) for call in calls]}
    prompt = chat.template.render([asked])
    whole = chat.template.render([asked, answer], generation_prompt=False)
    written = whole[len(prompt.removesuffix("<think>\n")) :].removeprefix("<think>\n\n</think>\n\n")
    said = chat.message_of(chat.template.encode(written.removesuffix("\n")))
    assert [(call.name, call.arguments) for call in said.tool_calls] == [(c.name, c.arguments) for c in calls]
    assert said.content == "" and not said.malformed and said.ended
    if family == "mistral_nemo":
        assert [call.id for call in said.tool_calls] == [call.id for call in calls]


def as_openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": %s}]',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n%s\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
}
"""A call in the format of each parser's models."""


def written(parser: str, query: str) -> str:
    """Returns a call of search."""
    call = CALLS[parser].replace("add", "search").replace("=a>", "=query>")
    return call % (query if parser == "qwen3_coder" else json.dumps({"query": query}, ensure_ascii=False))


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(queries=st.lists(marked_texts, min_size=1, max_size=2), after=st.sampled_from(["", "I wrote %s."]))
@example(queries=["what is <tool_call>?"], after="")
@example(queries=["x"], after="I wrote %s.")
def test_marks_in_arguments_and_behind_calls_begin_and_end_nothing(parser: str, queries: list[str], after: str) -> None:
    """Prose after closed calls may contain the closing mark."""
    closing = {"hermes": "</tool_call>", "qwen3_coder": "</tool_call>", "deepseek": "<｜tool▁call▁end｜>"}.get(parser)
    text = ("; " if parser == "llama3_json" else "\n").join(written(parser, query) for query in queries)
    if closing and after:
        text += after % closing
    found = parse(parser, text)
    assert [call.arguments for call in found.calls] == [{"query": query} for query in queries]
    assert {call.name for call in found.calls} == {"search"} and not found.malformed and found.begin == 0


ONE = (ToolCall("add", {"a": 1}),)
JSON = '{"name": "add", "arguments": {"a": 1}}'
FENCED = 'function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", f"<tool_call>{JSON}</tool_call>", ONE),
        ("hermes", f"<tool_call>\n{JSON}", ONE),
        ("hermes", f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", ONE * 2),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ONE),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
            (ToolCall("add", {"a": "</tool_call>"}),),
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', ONE),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; ' + JSON, ONE * 2),
        ("llama3_json", '{"a": 1}', ()),
        ("llama3_json", "{1, 2} is a set", ()),
        ("mistral", f"[TOOL_CALLS][{JSON}]", ONE),
        ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]", ONE * 2),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', ONE * 2),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', (ToolCall("add", {"a": 1}, "abcdefghi"),)),
        (
            "deepseek",
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ONE,
        ),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', ONE),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ONE),
        ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", ONE),
        (
            "qwen3_coder",
            "<tool_call><function=search><parameter=query>\n1\n2\n</parameter></function></tool_call>",
            (ToolCall("search", {"query": "1\n2"}),),
        ),
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>", (ToolCall("add", {}),)),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>", ONE),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</tool_call>", ONE),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>\n1\n<parameter=b>\n2\n</function></tool_call>" * 2,
            (ToolCall("add", {"a": 1, "b": 2}),) * 2,
        ),
        (
            "qwen3_coder",
            "<tool_call><function=search><parameter=query>\n1\n<parameter=b>\n</parameter></function></tool_call>",
            (ToolCall("search", {"query": "1\n<parameter=b>"}),),
        ),
    ],
)
def test_variants_that_models_write(parser: str, text: str, calls: tuple[ToolCall, ...]) -> None:
    found = parse(parser, f"So: {text}" if calls and parser != "llama3_json" else text)
    assert found.calls == calls and not found.malformed
    assert found.begin == (len(text) if not calls else 0 if parser == "llama3_json" else 4)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": </tool_call>'),
        ("hermes", "<tool_call>add(1)</tool_call>"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
        ("llama3_json", '<|python_tag|>add.call(query="1")'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS]{"name": "add"}'),
        ("deepseek", "<｜tool▁calls▁begin｜>none"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"),
        ("qwen3_coder", "<tool_call>\n<function=add>\nsums\n</function></tool_call>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ],
)
def test_what_only_begins_like_a_call_stays_text(parser: str, text: str) -> None:
    found = parse(parser, text)
    assert not found.calls and found.malformed == ((0, len(text)),) and found.begin == 0


def test_a_malformed_call_beside_a_good_one() -> None:
    chat = format_of("qwen2_5", (ADD, SEARCH))
    text = f"So:\n<tool_call>{JSON}</tool_call>\n<tool_call>oops</tool_call><|im_end|>"
    said = chat.message_of(chat.template.encode(text))
    assert [call.name for call in said.tool_calls] == ["add"] and said.malformed
    assert said.content == said.text == "So:\n<tool_call>oops</tool_call>"


@pytest.mark.parametrize("parser", CALLS)
def test_half_a_character_is_written_as_its_escape(parser: str) -> None:
    (call,) = parse(parser, CALLS[parser] % r'{"a": "x\ud83dy"}').calls
    given = call.arguments["a"] if parser == "qwen3_coder" else call.arguments
    assert given == {"a": r"x\ud83dy"}


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_a_number_that_json_cannot_write_makes_no_call(parser: str, number: str) -> None:
    """In the format of qwen3_coder, the parameter stays text."""
    found = parse(parser, CALLS[parser] % f'{{"a": {number}}}')
    if parser == "qwen3_coder":
        assert found.calls[0].arguments == {"a": f'{{"a": {number}}}'}
    else:
        assert not found.calls and found.malformed


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "<parameter=p>", "</parameter>", "</function>", "[TOOL_CALLS]"]
    + ["[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]
    + ["<｜tool▁call▁end｜>", "```json\n", "\n```", "function", "f", "{", "}", "[", "]", '"', ":", ",", "\\", "1e999"]
    + ["NaN", "-1e999", r"\ud83d", "null", '{"name": "f", "arguments": {}}', "é", " ", "\n", ";"]
)


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(text=st.lists(pieces, max_size=12).map("".join))
def test_nothing_that_a_model_writes_raises(parser: str, text: str) -> None:
    found = parse(parser, text)
    assert 0 <= found.begin <= len(text)
    assert all(found.begin <= begin < end <= len(text) for begin, end in found.malformed)
    json.dumps([call.arguments for call in found.calls], ensure_ascii=False, allow_nan=False).encode()
    assert (found.begin < len(text)) == bool(found.calls or found.malformed)
