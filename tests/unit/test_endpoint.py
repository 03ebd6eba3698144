"""Tests of the endpoint's streams and counts, of its feed for the engine, and of the options of serving."""

import asyncio
import json
import shlex
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rltrain.cli.main import main, parsed
from rltrain.cli.serve import device_named, greeting, sampling_of
from rltrain.data.assistant_turn import before_marks
from rltrain.data.chat_format import ChatFormat
from rltrain.data.tokenizer import TextDecoder, load_tokenizer
from rltrain.endpoint import anthropic_messages, openai
from rltrain.endpoint.answer import Choice
from rltrain.endpoint.app import EndpointSettings
from rltrain.endpoint.opening import (
    ChatOpening,
    Opening,
    PlaceOfTurn,
    SessionTrajectory,
    TextOpening,
    TokenText,
    chat_keys,
    cut_at,
)
from rltrain.endpoint.requests import RequestLimits, SamplingRules
from rltrain.errors import ConfigError
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.engine_feed import EngineBusy, EngineFeed, EngineGone, EngineMailbox, Mail, PendingTurn
from rltrain.rollout.sample import Sample, Status
from tests.support.chat_families import CHATML, FAMILIES, TAGS, TEMPLATES, TOOLS, format_of
from tests.support.rollout_models import load_engine, write_checkpoint
from tests.support.talking_engine import CONTEXT_TOKENS, OWNER, Endpoint, TalkingEngine, byte_tokenizer, endpoint
from tests.through_json import through_json

MESSAGES = ({"role": "user", "content": "hi"},)
FALLBACK = "bytes by fallback"
KINDS = (*FAMILIES, FALLBACK)


@cache
def chat_of(kind: str) -> ChatFormat:
    return ChatFormat(fallback_tokenizer(), tools=TOOLS) if kind == FALLBACK else format_of(kind, TOOLS)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer without tokens for most characters. It encodes their bytes and decodes them together."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(chr(code) for code in range(33, 127)), "▁"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHATML])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in TAGS])
    template = (TEMPLATES / "qwen3.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


class Drawn:
    """An answer with one choice, generated token by token."""

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
    """Returns the values at `path` of all events that have it."""
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
"""Texts, bytes, and tokens by number."""


def ids_of(chat: ChatFormat, parts: Sequence[str | bytes | int]) -> list[int]:
    """Returns token ids of the parts. Bytes give one token each."""
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
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # all other bytes are written from 256 on
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
    """The stream continues from the position of the changed text."""

    class Joins:
        def read(self, tokens: Sequence[int], stop: Any, mark: str) -> Any:
            return SimpleNamespace(text="I'm not", tool_calls=(), stop=None)

        def standing(self, tokens: Sequence[int], stop: Any) -> str:
            return "I am" if len(tokens) < 3 else "I'm"

    answer = Drawn(Joins(), [1, 2, 3, 4], (), Status.STOPPED)  # type: ignore[arg-type]
    asked = openai.CompletionRequest(prompt="hi")
    pieces = texts_of(openai._completion_chunks(answer, asked, service_of(chat_of("qwen3"))), "choices", 0, "text")
    assert pieces == ["I am", "'m not"]


ENGINE_CONTEXT_TOKENS = 128
VALUES = (
    *("1e400", "-1e400", "NaN", "Infinity", "1e39", "1e30", "1e-40", "1e-320", "1e-7", "0", "0.0", "-0.0", "-1", "-5"),
    *("1", "2", "2147483648", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1.5", "1e3", "1001"),
    *("0.5", "true", "false", "null", '"1"', '"x"', '""', "[]", "{}"),
)
DRAWS = ("temperature", "top_p", "top_k")
CHAT = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, '
OPENAI = ("n", "seed", "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": '"prompt": "a", "max_tokens": 3, ',
    "/v1/responses": '"input": "a", "max_output_tokens": 3, ',
    "/v1/messages": CHAT,
    "/generate": '"text": "a", "sampling_params": {"max_new_tokens": 3, ',
    "/sessions": "",
}
FIELDS = {
    "/v1/chat/completions": (
        *DRAWS,
        *OPENAI,
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "logit_bias", "ignore_eos", "stop"),
    ),
    "/v1/completions": (*DRAWS, *OPENAI, "max_tokens", "logprobs", "best_of", "prompt", "stop"),
    "/v1/responses": (*DRAWS, "max_output_tokens"),
    "/v1/messages": (*DRAWS, "max_tokens", "stop_sequences"),
    "/generate": (*DRAWS, "max_new_tokens", "n", "sampling_seed", "stop"),
    "/sessions": ("seed",),
}
LISTS = ("stop_token_ids", "prompt", "stop_sequences")
PLACES = [(path, field) for path, fields in FIELDS.items() for field in fields]
REFERENCE: dict[str, Any] = {
    "text": "b",
    "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5, "temperature": 0.9},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving(tmp_path_factory.mktemp("model"))[1] as found:
        yield found


def serving(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Returns the weights of a model, and an endpoint for its engine."""
    sizes = {"vocab_size": len(byte_tokenizer()), "max_position_embeddings": ENGINE_CONTEXT_TOKENS}
    engine, parameters = load_engine(
        write_checkpoint(folder, "qwen3", **sizes), max_context_tokens=ENGINE_CONTEXT_TOKENS
    )
    options = {"context_tokens": ENGINE_CONTEXT_TOKENS, "drawn_by": engine, "max_sessions": 10**6}
    return parameters, endpoint(lambda text: "", **options)


def post(served: Endpoint, path: str, body: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {OWNER}"}
    request = urllib.request.Request(served.url + path, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def reference(served: Endpoint) -> list[int]:
    status, answer = post(served, "/generate", json.dumps(REFERENCE))
    assert status == 200, answer
    return answer["output_ids"]


def check(served: Endpoint, path: str, field: str, *values: str) -> None:
    """Sends all values at once, together with a request of known tokens."""
    expected = reference(served)
    with ThreadPoolExecutor(1 + len(values)) as pool:
        other = pool.submit(reference, served)
        list(pool.map(lambda value: check_one(served, path, field, value), values))
        assert other.result() == expected


def check_one(served: Endpoint, path: str, field: str, value: str) -> None:
    given_value = f"[{value}]" if field in LISTS else f'{{"1": {value}}}' if field == "logit_bias" else value
    before = BODIES[path].replace(f'"{field}": 3, ', "")
    body = "{" + before + f'"{field}": {given_value}' + ("}" if "sampling_params" in before else "") + "}"
    status, answer = post(served, path, body)
    if status == 400:
        said = answer["error"]
        assert field in (said.get("param") or "") or field in said["message"], said
    else:
        assert status in (200, 201), (body, answer)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(VALUES) | st.floats().map(json.dumps) | st.integers().map(str))
def test_no_number_ends_the_engine_or_changes_what_others_draw(
    served: Endpoint, place: tuple[str, str], value: str
) -> None:
    check(served, *place, value)


@pytest.mark.slow
def test_every_odd_number_in_every_field(served: Endpoint) -> None:
    for place in PLACES:
        check(served, *place, *VALUES)


@pytest.mark.parametrize("path", [path for path, fields in FIELDS.items() if DRAWS[0] in fields])
def test_numbers_that_no_engine_can_draw_with_are_refused_by_name(served: Endpoint, path: str) -> None:
    bad = {
        "temperature": ("1e400", "1e39", "1001", "1e-40", "1e-320", "0.0009", "-1", "NaN"),
        "top_p": ("1e-300", "0", "1.01", "NaN", "1e400"),
        "top_k": ("-2", "-5", "2147483648", "1" + "0" * 400, "1.5"),
    }
    good = {"temperature": ("0.001", "1e3"), "top_p": ("1e-6",), "top_k": ("-1",)}
    for fields, wanted in ((bad, 400), (good, 200)):
        for field, value in ((field, value) for field, values in fields.items() for value in values):
            body = "{" + BODIES[path] + f'"{field}": {value}' + "}" * path.count("gen") + "}"
            status, answer = post(served, path, body)
            assert status == wanted, (field, value, answer)
            assert wanted == 200 or field in answer["error"]["message"], (value, answer)


def test_generation_ends_at_the_tokens_that_a_request_names(served: Endpoint) -> None:
    whole = reference(served)
    ends = {"stop_token_ids": [whole[4]], "ignore_eos": True}
    asked = {**REFERENCE, "sampling_params": {**REFERENCE["sampling_params"], **ends}}
    status, answer = post(served, "/generate", json.dumps(asked))
    assert status == 200 and answer["output_ids"] == whole[: whole.index(whole[4]) + 1]


@pytest.mark.parametrize("content", ["[]", '[{"type": "thinking", "thinking": ""}]'])
def test_a_message_that_says_nothing_is_refused(served: Endpoint, content: str) -> None:
    body = f'{{"max_tokens": 3, "messages": [{{"role": "user", "content": {content}}}]}}'
    status, answer = post(served, "/v1/messages", body)
    assert status == 400 and "messages" in answer["error"]["message"]


def test_a_request_whose_logits_are_not_finite_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    parameters, serve = serving(tmp_path)
    with serve as served:
        expected = reference(served)
        (letter,) = byte_tokenizer()("#")["input_ids"]
        assert letter not in expected
        whole = parameters["model.embed_tokens.weight"][letter].clone()
        parameters["model.embed_tokens.weight"][letter] = torch.nan
        odd = '{"text": "a#", "sampling_params": {"max_new_tokens": 30, "temperature": 0.9}}'
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(reference, served) for _ in range(3)]
            status, answer = post(served, "/generate", odd)
            assert status == 500 and "not finite" in answer["error"]["message"]
            assert [other.result() for other in others] == [expected] * 3
        status, _ = post(served, "/generate", odd)
        assert status == 500, "alone"
        assert reference(served) == expected
        parameters["model.embed_tokens.weight"][letter] = whole
        assert post(served, "/generate", odd)[0] == 200


@settings(max_examples=60, derandomize=True)
@given(
    text=st.text(alphabet="ab <[é\n", max_size=20),
    marks=st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3),
)
def test_what_stands_before_marks_stays_the_beginning_of_the_whole(text: str, marks: list[str]) -> None:
    whole, _ = cut_at(text, marks)
    sent = ""
    for size in range(len(text) + 1):
        stands = before_marks(text[:size], marks)
        assert whole.startswith(stands) and stands.startswith(sent)
        sent = stands


def test_messages_that_clients_write_anew_are_the_same() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    anew = {"function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    one = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    two = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": " \n", "tool_calls": [anew], "refusal": None},
    ]
    assert chat_keys([], one) == chat_keys([], two)
    assert chat_keys([], one) != chat_keys([{"name": "f"}], one)
    assert chat_keys([], one)[1] != chat_keys([], [{"role": "system", "content": "x"}])[1]


def test_a_branch_begins_at_the_end_of_a_turn() -> None:
    first = Sample(1, (9,), 0).drawn([5, 6], [-0.1, -0.2], [0, 0], Status.STOPPED)
    second = first.observed([7]).drawn([8], [-0.3], [1], Status.STOPPED)
    trajectory = SessionTrajectory(second, rewards={1: 0.5})
    ends = [PlaceOfTurn(trajectory, turn) for turn in range(2)]
    assert [end.turn_tokens for end in ends] == [(5, 6), (8,)] and [end.is_tip for end in ends] == [False, True]
    assert ends[0].context == first.context and ends[0].sample().turns == (2,)
    recorded = trajectory.finished()
    assert recorded.sample.turn_rewards == (0.0, 0.5) and recorded.sample.loss_mask == (True, True, False, True)
    branch = SessionTrajectory(second, parent=1, num_shared_tokens=2)
    assert branch.finished().sample.loss_mask == (False, False, False, True) and branch.num_drawn_tokens == 1


WARMED_UP = Path(__file__).resolve().parents[1] / "warmed_up"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "1e400"], "--temperature: got inf; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "nan"], "--temperature: got nan; expected 0, or a number from 0.001 to 1000"),
        (["--temperature", "1e-5"], "--temperature: got 1e-05; expected 0, or a number from 0.001 to 1000"),
        (["--top-p", "0"], "--top-p: got 0.0; expected a number, at least 0.000001 and at most 1"),
        (["--top-k", "-5"], "--top-k: got -5; expected a whole number, at least -1"),
    ],
)
def test_numbers_that_no_engine_can_draw_with_are_refused(options: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        sampling_of(parsed("serve", ["--checkpoint", "x", *options]))
    assert str(error.value) == expected


def test_others_are_taken() -> None:
    given = ["--checkpoint", "x", "--temperature", "0", "--top-p", "0.5", "--top-k", "-1"]
    sampling = sampling_of(parsed("serve", given))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)


@pytest.mark.parametrize(("token", "has_chats"), [("sk-1", True), (None, True), (None, False)])
def test_the_command_that_is_printed_asks_for_a_text_that_the_tokenizer_has(token: str | None, has_chats: bool) -> None:
    tokenizer = byte_tokenizer() if has_chats else load_tokenizer(WARMED_UP)
    rules = SamplingRules(SamplingParams(1.0, 1.0, 0, 64, (0,)), "request")
    settings = EndpointSettings(rules, RequestLimits(64, len(tokenizer)), "model", token)
    words = shlex.split(greeting("http://host:1", settings, tokenizer).splitlines()[1])
    path, body = words[1], json.loads(words[-1])
    assert path == ("http://host:1/v1/chat/completions" if has_chats else "http://host:1/v1/completions")
    assert ("Authorization: Bearer sk-1" in words) == (token is not None)
    text = body["messages"][0]["content"] if has_chats else body["prompt"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert text == "Hello" if has_chats else text.isdigit()


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("cuda", 0, "--device: got 'cuda', but "),
        ("cuda:2", 2, "--device: got 'cuda:2'; expected one of the 2 GPUs, from cuda:0"),
        ("gpu", 0, '--device: got \'gpu\'; expected "cpu", "cuda" or "cuda:N"'),
        ("meta", 0, "--device: got 'meta', a device unknown to rltrain"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    device: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["serve", "--checkpoint", str(WARMED_UP), "--device", device]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_the_first_gpu_is_taken_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(device_named(None)) == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(device_named(None)) == str(device_named("cpu")) == "cpu"


SAMPLINGS = [SamplingParams(temperature, 1.0, 0, CONTEXT_TOKENS, (257,)) for temperature in (0.0, 0.5, 1.0)]
TEXT = "abcdefghijklmnopqrstuvwxyz"


def feed_of(say: Callable[[str], str] = lambda context: TEXT, slice_steps: int = 7) -> tuple[EngineFeed, TalkingEngine]:
    engine = TalkingEngine(byte_tokenizer(), say, num_slots=3)
    return EngineFeed(engine, TextDecoder(byte_tokenizer()), EngineMailbox(100), slice_steps), engine


async def let_run() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def step(feed: EngineFeed, *others: EngineFeed) -> None:
    """Takes a step on the engine's first rank and on `others`, the ranks that receive its mail."""
    mail = feed.mail() or Mail()
    feed.begin_step(mail)
    for other in others:
        other.begin_step(through_json(mail))
    for one in (feed, *others):
        assert one.end_step(one.engine.step()) == []


turns = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of the request
        st.sampled_from(SAMPLINGS),
        st.one_of(st.none(), st.integers(1, 30)),  # limit of tokens
        st.sampled_from([(), ("f",), ("zz",), ("xy", "mno")]),  # stop strings
        st.one_of(st.none(), st.integers(1, 20)),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(turns=turns, suspended_at=st.sets(st.integers(0, 60), max_size=5))
def test_every_turn_is_drawn_to_its_end_or_given_up(turns: list, suspended_at: set[int]) -> None:
    async def run() -> None:
        feed, engine = feed_of()
        other_engine = TalkingEngine(byte_tokenizer(), engine.say, num_slots=3)
        other = EngineFeed(other_engine, TextDecoder(byte_tokenizer()), slice_steps=feed.slice_steps)
        tasks: dict[int, asyncio.Task[Sample]] = {}
        for now in range(1000):
            ask(feed.mailbox, turns, now, tasks)
            await let_run()
            if now in suspended_at:
                assert feed.take_back(engine.suspend()) == other.take_back(other_engine.suspend()) == []
            step(feed, other)
            assert engine.log == other_engine.log and engine.num_drawn_tokens == other_engine.num_drawn_tokens
            await let_run()
            if len(tasks) == len(turns) and all(task.done() for task in tasks.values()):
                break
        step(feed, other)
        assert feed.num_turns == other.num_turns == engine.num_unfinished == other_engine.num_unfinished == 0
        for number, (_, _, limit, stop, _) in enumerate(turns):
            if not tasks[number].cancelled():
                check_alphabet(tasks[number].result(), limit, stop)

    asyncio.run(run())


def ask(mailbox: EngineMailbox, turns: list, now: int, tasks: dict[int, asyncio.Task[Sample]]) -> None:
    """Submits the turns due at this step, and cancels the ones to give up."""
    for number, (comes, sampling, limit, stop, stays) in enumerate(turns):
        if comes == now:
            sample = Sample(number, (1, 2), number, turn_limit=limit)
            turn = PendingTurn(sample, sampling, stop, is_watched=number % 2 == 0)
            tasks[number] = asyncio.ensure_future(mailbox.draw(turn, lambda sample: None))
        if stays is not None and comes + stays == now:
            tasks[number].cancel()


def check_alphabet(sample: Sample, limit: int | None, stop: tuple[str, ...]) -> None:
    """Expects the alphabet up to the sample's limit or first stop string."""
    ends = [TEXT.index(string) + len(string) for string in stop if string in TEXT]
    stopped = min([*ends, len(TEXT) + 1])
    length = min(stopped, limit or stopped)
    assert byte_tokenizer().decode(sample.tokens, skip_special_tokens=True) == TEXT[: min(length, len(TEXT))]
    assert len(sample.tokens) == length and sample.turns == (length,)
    assert sample.status == (Status.STOPPED if length == stopped else Status.TRUNCATED)


def test_a_mailbox_has_room_for_so_many_and_tells_of_its_end() -> None:
    async def run() -> None:
        mailbox = EngineMailbox(1)
        first = asyncio.ensure_future(mailbox.draw(PendingTurn(Sample(0, (1,), 0), SAMPLINGS[0])))
        await let_run()
        with pytest.raises(ValueError, match="under way"):
            await mailbox.draw(PendingTurn(Sample(0, (1,), 0), SAMPLINGS[0]))
        with pytest.raises(EngineBusy):
            await mailbox.draw(PendingTurn(Sample(1, (1,), 0), SAMPLINGS[0]))
        mailbox.close("over")
        with pytest.raises(EngineGone, match="over"):
            await first
        with pytest.raises(EngineGone, match="over"):
            await mailbox.draw(PendingTurn(Sample(2, (1,), 0), SAMPLINGS[0]))

    asyncio.run(run())


def test_what_an_engine_refuses_fails_alone() -> None:
    async def run() -> None:
        feed, _ = feed_of()
        wrong = asyncio.ensure_future(feed.mailbox.draw(PendingTurn(Sample(0, (1,) * 5000, 0), SAMPLINGS[0])))
        right = asyncio.ensure_future(feed.mailbox.draw(PendingTurn(Sample(1, (1,), 0), SAMPLINGS[0])))
        await let_run()
        while not right.done():
            step(feed)
            await let_run()
        assert isinstance(wrong.exception(), Exception) and "5000 tokens" in str(wrong.exception())

    asyncio.run(run())


def test_mail_is_the_same_on_all_ranks() -> None:
    sampling = SamplingParams(1.0, 0.9, 5, 10, (257,), ("x",), GreedyPlaces(1, 4))
    sample = Sample(3, (1, 2), 7).drawn([4], [-0.5], [1], Status.STOPPED).observed([5], turn_limit=9)
    mail = Mail((PendingTurn(sample, sampling, ("y",), True),), frozenset({1}), frozenset({2, 8}))
    assert through_json(mail) == mail


def test_an_engine_is_told_which_conversations_are_over() -> None:
    feed, engine = feed_of()
    feed.mailbox.forget([3, 4])
    feed.begin_step(feed.mail() or Mail())
    assert engine.forgotten == {3, 4}


def test_what_others_draw_on_the_engine_stays_theirs() -> None:
    feed, engine = feed_of(lambda context: "x")
    engine.submit([Sample(77, (1,), 0)], SAMPLINGS[0])
    assert feed.take_back(engine.suspend()) == [Sample(77, (1,), 0)]
    engine.submit([Sample(78, (1,), 0)], SAMPLINGS[0])
    feed.begin_step(feed.mail() or Mail())
    engine.step()
    assert [sample.id for sample in feed.end_step(engine.step())] == [78]
