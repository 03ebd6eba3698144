"""What streams give piece by piece is what an answer has as a whole, in every API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rltrain.data.chat_format import ChatFormat
from rltrain.endpoint import anthropic_messages, openai
from rltrain.endpoint.answer import Choice
from rltrain.endpoint.opening import ChatOpening, Opening, TextOpening, TokenText
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.groups import PendingTurn
from rltrain.rollout.sample import Sample, Status
from tests.chat_families import CHATML, FAMILIES, TAGS, TEMPLATES, TOOLS, format_of

MESSAGES = ({"role": "user", "content": "hi"},)
FALLBACK = "bytes by fallback"
KINDS = (*FAMILIES, FALLBACK)


@cache
def chat_of(kind: str) -> ChatFormat:
    return ChatFormat(fallback_tokenizer(), tools=TOOLS) if kind == FALLBACK else format_of(kind, TOOLS)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Has no token for most characters: their bytes have tokens, which are decoded together."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(chr(code) for code in range(33, 127)), "▁"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHATML])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in TAGS])
    template = (TEMPLATES / "qwen3.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


class Drawn:
    """An answer of one choice that is drawn a token at a time."""

    def __init__(self, opening: Opening, tokens: Sequence[int], stop: tuple[str, ...], ends: Status) -> None:
        self.opening, self.tokens, self.ends = opening, tokens, ends
        self.choices = [Choice(PendingTurn(Sample(0, (1,), 0), SamplingParams(1.0, 1.0, 0, 10_000, ()), stop), "1.0")]

    @property
    def is_whole(self) -> bool:
        return self.choices[0].is_done

    async def changes(self) -> AsyncIterator[None]:
        (choice,) = self.choices
        for count in range(1, len(self.tokens) + 1):
            tokens = list(self.tokens[:count])
            status = self.ends if count == len(self.tokens) else Status.PENDING
            choice.sample = Sample(0, (1,), 0).drawn(tokens, [-1.0] * count, [0] * count, status)
            yield


async def all_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


def texts_of(events: AsyncIterator[Any], *path: Any) -> list[Any]:
    """What stands under `path` in each event that has it."""
    found = []
    for event in asyncio.run(all_of(events)):
        value: Any = event
        for name in path:
            value = value.get(name) if isinstance(value, dict) else (value[name] if isinstance(value, list) else None)
        found += [] if value is None else [value]
    return found


def service_of(chat: ChatFormat) -> Any:
    return SimpleNamespace(model="m", tokens=TokenText(chat.tokenizer), weight_version=lambda versions: {})


def check_chat(answer: Any, service: Any) -> None:
    asked = openai.ChatRequest(messages=[*MESSAGES])
    deltas = [choices[0]["delta"] for choices in texts_of(openai._chunks(answer, asked, service), "choices")]
    said = openai._completion(answer, asked, service)["choices"][0]["message"]
    calls = [{**call} for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content") or "" for delta in deltas) == (said["content"] or "")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == said.get("reasoning_content", "")
    assert [call.pop("index") for call in calls] == [*range(len(calls))]
    assert calls == said.get("tool_calls", [])


def check_messages(answer: Any, service: Any) -> None:
    asked = anthropic_messages.MessagesRequest(messages=[*MESSAGES], max_tokens=1)
    events = asyncio.run(all_of(anthropic_messages._events(answer, asked, {})))
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[event["index"]]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["input"] = json.loads(event["delta"]["partial_json"])
    assert blocks == anthropic_messages._blocks(answer.choices[0].read(answer.opening))


def check_responses(answer: Any, service: Any) -> None:
    asked = openai.ResponsesRequest(input="hi")
    events = asyncio.run(all_of(openai._events(answer, asked, {"id": "resp_1"})))
    ended = events[-1]["response"]["output"]
    texts = [part["text"] for item in ended if item["type"] == "message" for part in item["content"]]
    given = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(given) == "".join(texts)
    assert arguments == [item["arguments"] for item in ended if item["type"] == "function_call"]


def check_completions(answer: Any, service: Any) -> None:
    asked = openai.CompletionRequest(prompt="hi")
    pieces = texts_of(openai._completion_chunks(answer, asked, service), "choices", 0, "text")
    assert "".join(pieces) == answer.choices[0].read(answer.opening).text


CHECKS: tuple[Callable[[Any, Any], None], ...] = (check_chat, check_messages, check_responses, check_completions)
PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', "<function=add>"),
    *("<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]", "add[ARGS]", '{"a": 2}', "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "\n```"),
    *("1 < 2", "<thin", "The answer.", " ", "\n\n", "你", "😀", "\ufffd", "; ", "{", "[", "stop"),
)
FITTING = {
    "qwen3": '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>',
    "llama3_1": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "mistral_nemo": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "deepseek_r1": '</think>\n\nSo<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
}
soup = st.lists(st.sampled_from(PIECES) | st.binary(min_size=1, max_size=3) | st.integers(0), max_size=8)
"""Texts, bytes, and tokens by their numbers."""


def ids_of(chat: ChatFormat, parts: Sequence[str | bytes | int]) -> list[int]:
    """A token for every byte, where a part is bytes."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            tokens += chat.tokenizer(part, add_special_tokens=False)["input_ids"]
        elif isinstance(part, int):
            tokens.append(part % len(chat.tokenizer))
        else:
            tokens += [byte_token(chat, byte) for byte in part]
    return tokens or [0]


def byte_token(chat: ChatFormat, byte: int) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others are written from 256 on
    others = [number for number in range(256) if number not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    spelling = f"<0x{byte:02X}>" if f"<0x{byte:02X}>" in chat.tokenizer.get_vocab() else letter
    return int(chat.tokenizer.convert_tokens_to_ids(spelling))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(parts=soup, stop=st.sampled_from([(), ("stop", "answer.\n"), (">", "< 2")]), ends=st.booleans())
@example(parts=[b"\xe4\xbd\xa0\xc3", "hello"], stop=(), ends=True)
@example(parts=["The answer.", "</think>", "\n\n", "4"], stop=(), ends=True)
@example(parts=["<think>", "Hm.", "</think>", "\n\n", "4"], stop=(), ends=True)
@example(
    parts=["So: ", '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>'], stop=(), ends=True
)
@example(parts=["So: ", "<function=add><parameter=a>1</parameter></function>"], stop=(), ends=False)
@example(parts=["So: ", *FITTING.values()], stop=(), ends=True)
@example(parts=[FITTING["mistral_nemo"]], stop=(), ends=True)
@example(parts=[FITTING["llama3_1"]], stop=(), ends=True)
def test_a_stream_gives_what_the_whole_has(
    kind: str, parts: list[str | bytes | int], stop: tuple[str, ...], ends: bool
) -> None:
    chat = chat_of(kind)
    for check in CHECKS:
        opening = TextOpening(TokenText(chat.tokenizer), "hi") if check is check_completions else None
        tokens = ids_of(chat, parts)
        status = Status.TRUNCATED
        if ends:
            tokens, status = [*tokens, int(chat.tokenizer.eos_token_id)], Status.STOPPED
        answer = Drawn(opening or ChatOpening(MESSAGES, (), chat), tokens, stop, status)
        check(answer, service_of(chat))


def test_text_is_given_before_the_turn_is_done() -> None:
    chat = chat_of("qwen3")
    tokens = ids_of(chat, ["If 1 < 2, then it is so."])
    choice = Choice(PendingTurn(Sample(0, (1,), 0), SamplingParams(1.0, 1.0, 0, 10_000, ())), "1.0")
    choice.sample = choice.sample.drawn(tokens, [-1.0] * len(tokens), [0] * len(tokens))
    assert choice.standing(ChatOpening(MESSAGES, (), chat)) == "If 1 < 2, then it is so."


def test_a_tokenizer_that_takes_text_back_ends_no_stream_in_silence() -> None:
    """The stream goes on from the place where the text changed."""

    class Joins:
        def read(self, tokens: Sequence[int], stop: Any, mark: str) -> Any:
            return SimpleNamespace(text="I'm not", tool_calls=(), stop=None)

        def standing(self, tokens: Sequence[int], stop: Any) -> str:
            return "I am" if len(tokens) < 3 else "I'm"

    answer = Drawn(Joins(), [1, 2, 3, 4], (), Status.STOPPED)  # type: ignore[arg-type]
    asked = openai.CompletionRequest(prompt="hi")
    pieces = texts_of(openai._completion_chunks(answer, asked, service_of(chat_of("qwen3"))), "choices", 0, "text")
    assert pieces == ["I am", "'m not"]
