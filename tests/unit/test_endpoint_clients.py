"""Tests of the endpoint with common clients and agents."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rltrain.endpoint.opening import RecordedSession, RecordedTrajectory
from rltrain.environments.agent import SESSION, AgentEnvironment, AgentFailed, printed_reward
from rltrain.environments.interface import Row, StepResult
from rltrain.errors import ConfigError
from rltrain.rewards.locating import found_command
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Status
from rltrain.sandbox.means import means
from tests.support.talking_engine import END, OWNER, Endpoint, byte_tokenizer, endpoint

WEATHER = {
    "name": "weather",
    "description": "Of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = 'Let me look. <tool_call>{"name": "weather", "arguments": {"town": "Bonn"}}</tool_call>'


def say(context: str) -> str:
    """Returns the last user message with an exclamation. With tools and no result yet, returns a call instead."""
    last = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[-1:]
    if "Tools:" in context and "<tool_response>" not in context:
        return CALL
    return f"{last[0].strip() if last else context}! Grüße, 世界."


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(say) as running:
        yield running


@pytest.fixture
def session(served: Endpoint) -> tuple[str, str]:
    """Returns (id, token) of a new session."""
    opened = served.server.open_session({"row": 7})
    return opened.id, opened.token


@pytest.fixture
def client(served: Endpoint, session: tuple[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=session[1], max_retries=0)


@pytest.fixture
def claude(served: Endpoint, session: tuple[str, str]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=session[1], max_retries=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assert_as_the_engine_drew_it(served: Endpoint, trajectory: RecordedTrajectory) -> None:
    """Expects equal ids, log-probs and versions in the record and in the engine's log of the last turn."""
    sample = trajectory.sample
    logged = next(entry for entry in reversed(served.engine.log) if entry.id == sample.id)
    assert (logged.prompt, logged.tokens) == (sample.prompt, sample.tokens)
    assert (logged.logprobs, logged.policy_versions) == (sample.logprobs, sample.policy_versions)


def test_turns_of_a_conversation_are_one_trajectory_of_the_ids_that_were_drawn(
    served: Endpoint, session: tuple[str, str], client: openai.OpenAI
) -> None:
    messages: list = [{"role": "system", "content": "Be loud."}, user("one")]
    for text in ("two", "three"):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0]
        assert answer.finish_reason == "stop"
        messages += [answer.message, user(text)]
    last = client.chat.completions.create(model="any", messages=messages)
    assert last.choices[0].message.content == "three! Grüße, 世界."
    recorded = served.record(session[0])
    (trajectory,) = recorded.trajectories
    assert_as_the_engine_drew_it(served, trajectory)
    sample = trajectory.sample
    drawn = [token for token, is_drawn in zip(sample.tokens, sample.loss_mask, strict=True) if is_drawn]
    said = "".join(f"{word}! Grüße, 世界.{END}" for word in ("one", "two", "three"))
    assert byte_tokenizer().decode(drawn) == said
    assert len(sample.turns) == 3 and last.usage.prompt_tokens + last.usage.completion_tokens == len(sample.context)
    assert recorded.metadata == {"row": 7} and recorded.ended_by == "test"


def test_a_stream_says_what_an_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=[user("hello")]).choices[0].message.content
    stream = client.chat.completions.create(
        model="any", messages=[user("hello")], stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    tokens = [item for logprobs in told if logprobs for item in logprobs.content]
    assert "".join(texts) == whole
    assert len(tokens) == chunks[-1].usage.completion_tokens
    assert bytes(byte for item in tokens for byte in item.bytes).decode(errors="ignore").endswith(END)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(
    served: Endpoint, session: tuple[str, str], client: openai.OpenAI, stream: bool
) -> None:
    messages: list = [user("How is Bonn?")]
    tools = [{"type": "function", "function": WEATHER}]
    if stream:
        with client.chat.completions.stream(model="any", messages=messages, tools=tools) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "Let me look."
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Bonn"})
    echoed = choice.message.model_dump(exclude_none=True)
    messages += [echoed, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0]
    assert "rain" in last.message.content
    (trajectory,) = served.record(session[0]).trajectories
    assert_as_the_engine_drew_it(served, trajectory)
    assert len(trajectory.sample.turns) == 2


def test_several_choices_branch_and_one_goes_on(
    served: Endpoint, session: tuple[str, str], client: openai.OpenAI
) -> None:
    first = client.chat.completions.create(model="any", messages=[user("a")]).choices[0].message
    messages: list = [user("a"), first, user("b")]
    several = client.chat.completions.create(model="any", messages=messages, n=3, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    seeds = [sample.seed for sample in served.engine.submitted[-3:]]
    assert len(set(seeds)) == 3
    messages += [several.choices[0].message, user("c")]
    client.chat.completions.create(model="any", messages=messages)
    trunk, *branches = served.record(session[0]).trajectories
    assert len(trunk.sample.turns) == 3 and [branch.parent for branch in branches] == [trunk.sample.id] * 2
    shared = trunk.sample.turns[0]
    for branch in branches:
        assert branch.num_shared_tokens == shared and branch.sample.tokens[:shared] == trunk.sample.tokens[:shared]
        assert not any(branch.sample.loss_mask[:shared]) and any(branch.sample.loss_mask[shared:])
    owner = openai.OpenAI(base_url=f"{served.url}/v1", api_key=OWNER, max_retries=0)
    again = owner.chat.completions.create(model="any", messages=messages[:3], n=3, seed=5)
    assert [sample.seed for sample in served.engine.submitted[-3:]] == seeds and len(again.choices) == 3


def test_a_request_ends_its_turn_by_its_own_strings_and_length(
    served: Endpoint, session: tuple[str, str], client: openai.OpenAI
) -> None:
    stopped = client.chat.completions.create(model="any", messages=[user("stop here")], stop=[", 世"], logprobs=True)
    assert stopped.choices[0].message.content == "stop here! Grüße"
    assert stopped.choices[0].finish_reason == "stop"
    items = stopped.choices[0].logprobs.content
    assert bytes(byte for item in items for byte in item.bytes or ()).startswith(b"stop here!")
    cut = client.chat.completions.create(model="any", messages=[user("cut")], max_completion_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("cut", "length")
    one, two = (trajectory.sample for trajectory in served.record(session[0]).trajectories)
    assert byte_tokenizer().decode(one.tokens) == "stop here! Grüße, 世" and len(items) == len(one.tokens)
    assert (one.status.name, two.status.name, len(two.tokens)) == ("STOPPED", "TRUNCATED", 3)


def test_completions_of_texts_and_of_ids(served: Endpoint, session: tuple[str, str], client: openai.OpenAI) -> None:
    text = client.completions.create(model="any", prompt="x", max_tokens=60, logprobs=0)
    assert text.choices[0].text == "x! Grüße, 世界."
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
    client.completions.create(model="any", prompt=f"x{text.choices[0].text} and", max_tokens=4)
    ids = [1, 2, 3]
    raw = client.completions.create(model="any", prompt=ids, max_tokens=5, extra_body={"return_token_ids": True})
    drawn = raw.choices[0].token_ids
    assert (raw.choices[0].prompt_token_ids, len(drawn)) == (ids, 5)
    client.completions.create(model="any", prompt=[*ids, *drawn, 9], max_tokens=5)
    chunks = client.completions.create(model="any", prompt="y", max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "y! Grüße, 世界."
    many = client.completions.create(model="any", prompt=["p", "q"], max_tokens=1, n=2)
    assert [choice.text for choice in many.choices] == ["p", "p", "q", "q"]
    first, second, *_ = served.record(session[0]).trajectories
    assert len(first.sample.turns) == 2 and second.sample.context == (*ids, *drawn, 9, *second.sample.tokens[-5:])


def test_responses_go_on_by_their_ids(served: Endpoint, session: tuple[str, str], client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="one", instructions="Be loud.")
    assert first.output_text == "one! Grüße, 世界." and first.status == "completed"
    second = client.responses.create(
        model="any", input="two", instructions="Be loud.", previous_response_id=first.id, stream=True
    )
    events = [*second]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "two! Grüße, 世界."
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "two! Grüße, 世界."
    (trajectory,) = served.record(session[0]).trajectories
    assert_as_the_engine_drew_it(served, trajectory)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_functions(client: openai.OpenAI, stream: bool) -> None:
    tools = [{"type": "function", **WEATHER}]
    items: list = [{"role": "user", "content": "How is Bonn?"}]
    if stream:
        with client.responses.stream(model="any", input=items, tools=tools) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(model="any", input=items, tools=tools)
    call = next(item for item in response.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Bonn"})
    items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert "rain" in client.responses.create(model="any", input=items, tools=tools).output_text


def test_claudes_messages(served: Endpoint, session: tuple[str, str], claude: anthropic.Anthropic) -> None:
    messages: list = [user("one")]
    first = claude.messages.create(model="any", max_tokens=99, system="Be loud.", messages=messages)
    assert first.content[0].text == "one! Grüße, 世界." and first.stop_reason == "end_turn"
    counted = claude.messages.count_tokens(model="any", system="Be loud.", messages=messages)
    assert counted.input_tokens == first.usage.input_tokens
    messages += [{"role": "assistant", "content": first.content}, user("two")]
    with claude.messages.stream(model="any", max_tokens=99, system="Be loud.", messages=messages) as stream:
        texts = [*stream.text_stream]
        last = stream.get_final_message()
    assert "".join(texts) == last.content[0].text == "two! Grüße, 世界."
    cut = claude.messages.create(model="any", max_tokens=99, messages=[user("x")], stop_sequences=["üß"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "üß", "x! Gr")
    trajectory, _ = served.record(session[0]).trajectories
    assert_as_the_engine_drew_it(served, trajectory)
    assert len(trajectory.sample.turns) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_claudes_tools(served: Endpoint, session: tuple[str, str], claude: anthropic.Anthropic, stream: bool) -> None:
    tools = [{"name": "weather", "description": "Of a town.", "input_schema": WEATHER["parameters"]}]
    messages: list = [user("How is Bonn?")]
    if stream:
        with claude.messages.stream(model="any", max_tokens=200, messages=messages, tools=tools) as events:
            first = events.get_final_message()
    else:
        first = claude.messages.create(model="any", max_tokens=200, messages=messages, tools=tools)
    use = next(block for block in first.content if block.type == "tool_use")
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "weather", {"town": "Bonn"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(model="any", max_tokens=200, messages=messages, tools=tools)
    assert "rain" in last.content[0].text
    (trajectory,) = served.record(session[0]).trajectories
    assert_as_the_engine_drew_it(served, trajectory)


def test_a_library_that_repeats_a_request_has_it_drawn_once() -> None:
    opened = threading.Event()

    def hold(number: int) -> None:
        assert opened.wait(60)

    with endpoint(say, before_step=hold) as slow:
        session = slow.server.open_session()
        client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key=session.token, max_retries=2, timeout=0.5)
        threading.Timer(0.6, opened.set).start()  # after the first attempt is given up
        answer = client.chat.completions.create(model="any", messages=[user("once")])
        assert answer.choices[0].message.content == "once! Grüße, 世界."
        assert len(slow.engine.submitted) == 1 and len(slow.record(session.id).trajectories) == 1


def test_what_is_refused_is_an_error_that_clients_understand(
    served: Endpoint, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(model="any", messages=[user("x")], logit_bias={"5": 1})
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(model="any", messages=[user("x")], logprobs=True, top_logprobs=5)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="any", messages=[user("x" * 5000)])
    assert too_long.value.code == "context_length_exceeded"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(openai.BadRequestError, match="image_url.*takes no images: model.vision is not set"):
        client.chat.completions.create(model="any", messages=[picture])
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(model="any", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-wrong", max_retries=0).models.list()
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        claude.messages.create(model="any", max_tokens=9, messages=[user("x")], tool_choice={"type": "any"})
    with pytest.raises(anthropic.AuthenticationError):
        wrong = anthropic.Anthropic(base_url=served.url, api_key="sk-wrong", max_retries=0)
        wrong.messages.create(model="any", max_tokens=9, messages=[user("x")])
    assert [model.id for model in client.models.list()] == ["model"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
OF_OWNER = {"Authorization": f"Bearer {OWNER}"}
ANSWER = {"type": "message", "role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {**CHAT, "functions": [WEATHER]}, "functions"),
        ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "echo": True}, "echo"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("completions", {"prompt": ["x"] * 257}, "prompt: got 257 of them; expected at most"),
        ("completions", {"prompt": ["x", "y"], "stream": True}, "2 of them with stream"),
        ("responses", {"input": "x", "background": True}, "background"),
        ("responses", {"input": "x", "conversation": "conv_1"}, "conversation"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, "item_reference"),
        ("responses", {"input": [ANSWER | {"content": [{"type": "input_image"}]}]}, "input_image"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served: Endpoint, path: str, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{served.url}/v1/{path}", json=body, headers=OF_OWNER, verify=False)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_streams_tell_ids_and_counts_when_asked(served: Endpoint, path: str) -> None:
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    body = {**(CHAT if path.startswith("chat") else {"prompt": "x"}), **options}
    lines = httpx.post(f"{served.url}/v1/{path}", json=body, headers=OF_OWNER, verify=False).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert len(ids) == 5 == events[-1]["usage"]["completion_tokens"] and events[-1]["choices"] == []


def call_ids(answer: dict[str, Any]) -> list[str]:
    """Returns the ids of the tool calls in an answer of any API."""
    calls = answer["choices"][0]["message"]["tool_calls"] if "choices" in answer else answer.get("content") or []
    calls = calls + answer.get("output", [])
    return [call.get("call_id") or call["id"] for call in calls if call.get("type") != "text" and "content" not in call]


TOOLS = {
    "chat/completions": {"type": "function", "function": WEATHER},
    "responses": {"type": "function", **WEATHER},
    "messages": {"name": "weather", "input_schema": WEATHER["parameters"]},
}


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("in_session", [False, True])
def test_equal_calls_of_several_turns_and_requests_have_ids_of_their_own_that_templates_take(
    served: Endpoint, path: str, in_session: bool
) -> None:
    token = served.server.open_session().token if in_session else OWNER
    made: list[str] = []
    for key in ("a", "b", "c"):
        body = {"input" if path == "responses" else "messages": [user("How is Bonn?")], "tools": [TOOLS[path]]}
        limits = {"max_tokens": 200} if path == "messages" else {}
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
        answer = httpx.post(f"{served.url}/v1/{path}", json={**body, **limits}, headers=headers)
        assert answer.status_code == 200, answer.text
        made += call_ids(answer.json())
    assert len(made) == len(set(made)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in made)


def test_equal_calls_of_turns_that_go_on_from_each_other_have_ids_of_their_own() -> None:
    with endpoint(lambda context: CALL) as served:
        for token in (OWNER, served.server.open_session().token):
            messages: list[dict[str, Any]] = [user("How is Bonn?")]
            for _ in range(3):
                body = {"messages": messages, "tools": [TOOLS["chat/completions"]]}
                headers = {"Authorization": f"Bearer {token}"}
                answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers).json()
                (id,) = call_ids(answer)
                assert id not in [message.get("tool_call_id") for message in messages]
                messages += [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": id, "content": "rain"}]


NUM_AGENTS = 64
CONTEXT = 16384


def call_tool(context: str) -> str:
    """Calls its tool, then answers with the tool's result."""
    observed = re.findall(r"Observation:\n(\d+)", context)
    asked = int(re.findall(r"What is twice (\d+)", context)[0])
    name, arguments = ("final_answer", {"answer": observed[-1]}) if observed else ("double", {"number": asked})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
def test_smolagents_solves_its_tasks_through_sessions() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: Any.
        """
        return 2 * number

    own = SamplingParams(1.0, 1.0, 0, CONTEXT, (257,))
    with endpoint(call_tool, policy="override", sampling=own, context_tokens=CONTEXT) as served:
        is_together = Barrier(NUM_AGENTS)

        def solve(number: int) -> str:
            opened = served.server.open_session({"number": number})
            model = OpenAIModel("policy", api_base=f"{served.url}/sessions/{opened.id}/v1", api_key=opened.token)
            agent = ToolCallingAgent([double], model, max_steps=4, verbosity_level=0)
            is_together.wait(60)
            assert agent.run(f"What is twice {number}?") == str(2 * number)
            return opened.id

        with ThreadPoolExecutor(NUM_AGENTS) as agents:
            ids = [*agents.map(solve, range(NUM_AGENTS))]
        sessions = [served.record(number, reward=1.0) for number in ids]
        for session in sessions:
            turns = sum(len(trajectory.sample.turns) for trajectory in session.trajectories)
            drawn = sum(sum(trajectory.sample.loss_mask) for trajectory in session.trajectories)
            assert turns == 2 and drawn > 0
        recorded = [trajectory.sample for session in sessions for trajectory in session.trajectories]
        assert sum(sum(sample.loss_mask) for sample in recorded) == served.engine.num_drawn_tokens
        logged = {(entry.context, entry.logprobs) for entry in served.engine.log}
        assert {(sample.context, sample.logprobs) for sample in recorded} <= logged


AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

row = json.load(open(os.environ["RLTRAIN_ROW"]))
messages = [{"role": "user", "content": row["question"]}]
for turn in range(2):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
if row["how"] == "posts":
    post(os.environ["RLTRAIN_SESSION_URL"] + "/reward", {"reward": 0.5})
elif row["how"] == "prints":
    print(json.dumps({"reward": len(messages)}))
elif row["how"] == "fails":
    sys.exit("no such answer")
elif row["how"] == "hangs":
    import time
    time.sleep(1000)
"""
AVAILABLE = [name for name, finding in means().items() if finding.works]


@pytest.fixture(scope="module")
def counting_endpoint() -> Iterator[Endpoint]:
    with endpoint(lambda context: f"I heard {len(re.findall('user', context))}") as running:
        yield running


def run(served: Endpoint, how: str, **settings: Any) -> tuple[StepResult | AgentFailed, RecordedSession]:
    """Returns the result of an agent's episode, and its recorded session."""
    opened = served.server.open_session({"row": how}, seed=3)
    session = {"url": f"{served.url}/sessions/{opened.id}", "token": opened.token}
    row = {"question": "Why?", "how": how, SESSION: session}
    try:
        result: Any = asyncio.run(AgentEnvironment(**settings).reset([row], [0]))[0]
    except AgentFailed as failed:
        result = failed
    served.server.end_session(opened.id, "its agent ended")
    return result, next(session for session in served.ended if session.id == opened.id)


def program(sandbox: str, wall_s: float = 60.0) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", AGENT], "sandbox": sandbox, "limits": {"wall_s": wall_s}}


@pytest.mark.parametrize("sandbox", ["none", *AVAILABLE[:1]])
def test_a_program_speaks_to_its_session_and_gives_its_reward(counting_endpoint: Endpoint, sandbox: str) -> None:
    result, session = run(counting_endpoint, "posts", **program(sandbox))
    assert isinstance(result, StepResult) and result.done, result
    (trajectory,) = session.trajectories
    assert (session.reward, session.metadata) == (0.5, {"row": "posts"})
    assert len(trajectory.sample.turns) == 2 and trajectory.sample.status is Status.STOPPED


def test_what_a_program_prints_last_may_be_its_reward(counting_endpoint: Endpoint) -> None:
    result, _ = run(counting_endpoint, "prints", **program("none"))
    assert isinstance(result, StepResult) and (result.reward, result.info["rewarded"]) == (5.0, 1.0)
    assert printed_reward(b'thinking\n{"reward": 1}\n') == 1.0
    for output in (b"", b"1", b'{"reward": true}', b'{"reward": NaN}', b'{"reward": 1}\nmore', b"\xff"):
        assert printed_reward(output) is None


def test_a_program_that_fails_or_hangs_costs_its_episode(counting_endpoint: Endpoint) -> None:
    failed, _ = run(counting_endpoint, "fails", **program("none"))
    assert isinstance(failed, AgentFailed) and "no such answer" in str(failed) and "status 1" in str(failed)
    hung, _ = run(counting_endpoint, "hangs", **program("none", wall_s=1.5))
    assert isinstance(hung, AgentFailed) and "limit: time" in str(hung)


async def asks_once(row: Row, base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=[user(row["question"])])
    return float(answer.choices[0].message.content == "I heard 1")


def says_nothing(row: Row) -> None:
    """Returns no reward."""


def test_a_function_is_awaited(counting_endpoint: Endpoint) -> None:
    result, session = run(counting_endpoint, "", function=f"{__name__}:asks_once")
    assert isinstance(result, StepResult) and result.reward == 1.0
    assert len(session.trajectories) == 1
    result, _ = run(counting_endpoint, "", function=f"{__name__}:says_nothing")
    assert isinstance(result, StepResult) and result.info["rewarded"] == 0.0


@pytest.mark.parametrize("sandbox", ["none", *AVAILABLE[:1]])
def test_a_program_is_found_where_the_job_was_started_and_may_import_from_there(
    counting_endpoint: Endpoint, sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs in another, writable folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        "import json, os, sys, beside\n"
        "assert json.load(open(os.environ['RLTRAIN_ROW']))['question'] == 'Why?'\n"
        "open('written', 'w').close()\n"
        "print(json.dumps({'reward': float(os.getcwd() != os.path.dirname(sys.argv[1]))}))\n"
    )
    (tmp_path / "beside.py").write_text("")
    for command in ([sys.executable, "agent.py", "agent.py"], [sys.executable, "-m", "agent", "./agent.py"]):
        result, _ = run(counting_endpoint, "", command=command, sandbox=sandbox)
        assert isinstance(result, StepResult) and result.reward == 1.0, result
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["agent.py", "beside.py"]


def test_words_of_a_command_that_name_no_file_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").mkdir()
    (tmp_path / "python3").touch()
    command = ["python3", "-c", "pass", "math", "--task", "-", "no/such", ""]
    assert found_command(command, "env.agent.command") == command
    assert found_command(["./python3", "./math"], "")[1] == str(tmp_path / "math")


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = re.escape(f"there is no file 'agent.py' (relative paths start at {tmp_path})")
    for command in (["python3", "-u", "agent.py"], ["/usr/bin/python3.11", "agent.py", "x"], ["bash", "agent.py"]):
        with pytest.raises(ConfigError, match=r"env\.agent\.command: .*" + expected):
            AgentEnvironment(command=command)
