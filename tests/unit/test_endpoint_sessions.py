"""Tests of requests at the endpoint: the continued sample, and every field of both protocols."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from rltrain.endpoint.anthropic_messages import MessagesRequest
from rltrain.endpoint.app import GenerateRequest, GenerateSampling
from rltrain.endpoint.openai import ChatRequest, CompletionRequest, ResponsesRequest
from rltrain.endpoint.opening import RecordedSession
from rltrain.endpoint.requests import RequestRefused
from rltrain.endpoint.service import HARMLESS, NEUTRAL, TRUE_BY_DEFAULT, WISHES
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Status
from tests.support.talking_engine import CONTEXT_TOKENS, OTHER_END, OWNER, Endpoint, byte_tokenizer, endpoint

CHAT = "/v1/chat/completions"
OF_OWNER = {"Authorization": f"Bearer {OWNER}"}


def say(context: str) -> str:
    return f"reply {len(context)}"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Client:
    """A client of one session. It uses no library with automatic retries."""

    def __init__(self, served: Endpoint, metadata: object = None) -> None:
        self.served, self.opened = served, served.server.open_session(metadata)
        self.http = httpx.Client(
            base_url=served.url, headers={"Authorization": f"Bearer {self.opened.token}"}, timeout=60, verify=False
        )

    def chat(self, *messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": messages, **fields}, headers=headers)

    def said(self, *messages: Any, **fields: Any) -> dict[str, Any]:
        response = self.chat(*messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    def record(self) -> RecordedSession:
        return self.served.record(self.opened.id)


@contextmanager
def talk(*, say: Callable[[str], str] = say, **options: Any) -> Iterator[tuple[Endpoint, Client]]:
    """Opens an endpoint and a session with its client."""
    with endpoint(say, **options) as served:
        yield served, Client(served)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("policy", ["request", "override"])
def test_a_turn_may_end_with_any_of_the_models_end_tokens(policy: Any) -> None:
    """The next prompt has the generated end token instead of the template's."""
    call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    ends = byte_tokenizer().convert_tokens_to_ids([OTHER_END])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with talk(say=lambda context: call + OTHER_END, policy=policy, end_tokens=ends) as (served, client):
        said = client.said(user("a"), tools=[tool])
        assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "found"}
        client.said(user("a"), said, result, tools=[tool])
        context = served.engine.tokenizer.decode(served.engine.log[-1].context)
    assert f"{call}{OTHER_END}\n<|im_start|>user\n<tool_response>" in context


class Gate:
    """A gate in front of the engine's next steps. The engine waits until it is opened."""

    def __init__(self) -> None:
        self.opened, self.waiting = threading.Event(), threading.Event()
        self.at_step: Callable[[int], None] = lambda number: None

    def __call__(self, number: int) -> None:
        self.at_step(number)
        self.waiting.set()
        assert self.opened.wait(60)


def test_64_sessions_at_once_record_what_the_engine_drew() -> None:
    num_sessions, num_turns = 64, 2

    async def episode(served: Endpoint, client: httpx.AsyncClient, number: int) -> str:
        opened = await asyncio.to_thread(served.server.open_session, {"number": number})
        headers = {"Authorization": f"Bearer {opened.token}"}
        messages: list[Any] = [user(f"episode {number}")]
        for turn in range(num_turns):
            body = {"messages": messages, "max_tokens": 40, "stream": False}
            answer = await client.post(f"/sessions/{opened.id}{CHAT}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], user(f"turn {turn} of {number}")]
        done = await client.post(f"/sessions/{opened.id}/finish", json={"reward": number}, headers=headers)
        assert done.json()["reward"] == number
        return opened.id

    async def all_episodes(served: Endpoint) -> list[str]:
        limits = httpx.Limits(max_connections=num_sessions)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits, verify=False) as client:
            return await asyncio.gather(*(episode(served, client, number) for number in range(num_sessions)))

    with endpoint(say, num_slots=16) as served:
        numbers = asyncio.run(all_episodes(served))
        log = {(entry.id, len(entry.tokens)): entry for entry in served.engine.log}
        assert len(log) == num_sessions * num_turns and len(served.ended) == num_sessions
        for session in served.ended:
            assert session.id in numbers and session.reward == session.metadata["number"]
            (trajectory,) = session.trajectories
            sample = trajectory.sample
            drawn = log[sample.id, len(sample.tokens)]
            assert drawn.context == sample.context and drawn.logprobs == sample.logprobs
            assert drawn.loss_mask == sample.loss_mask and len(sample.turns) == num_turns


def test_weights_that_change_between_turns_and_inside_one_are_told_apart() -> None:
    with endpoint(say) as served:

        def sync(number: int) -> None:
            if number == change_at[0]:
                served.engine.policy_version = (served.engine.policy_version or 0) + 1

        change_at = [5]
        served.engine.before_step = sync
        client = Client(served)
        first = client.said(user("a"))
        served.engine.policy_version = 7
        change_at[0] = served.engine.num_steps + 2
        client.said(user("a"), first, user("b"))
        (trajectory,) = client.record().trajectories
    sample = trajectory.sample
    versions = [v for v, drawn in zip(sample.policy_versions, sample.loss_mask, strict=True) if drawn]
    turn = len("reply 00") + 1
    assert versions[:turn] == [0] * 5 + [1] * (turn - 5)
    assert versions[turn:] == [7] * 2 + [8] * (len(versions) - turn - 2)


def test_a_client_that_goes_and_does_not_come_back_leaves_nothing() -> None:
    gate = Gate()
    with talk(before_step=gate, repeat_within_s=0.0) as (served, client):
        with pytest.raises(httpx.ReadTimeout):
            client.http.post(CHAT, json={"messages": [user("a")]}, timeout=0.2)
        assert gate.waiting.wait(60)
        wait_until(lambda: served.mailbox.num_turns == 0)
        gate.opened.set()
        kept = client.said(user("b"))  # answered after the engine has dropped the earlier request
        assert kept["content"].startswith("reply")
        (trajectory,) = client.record().trajectories
        assert "user\nb" in byte_tokenizer().decode(trajectory.sample.prompt)
        assert len(served.engine.log) == 1


def test_pieces_come_while_the_rest_is_drawn() -> None:
    gate, half = Gate(), 12
    gate.opened.set()
    gate.at_step = lambda number: gate.opened.clear() if number == half else None
    with (
        talk(say=lambda context: "0123456789abcdef", before_step=gate) as (served, client),
        client.http.stream("POST", CHAT, json={"messages": [user("a")], "stream": True}) as stream,
    ):
        said = ""
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                said += choice["delta"].get("content", "")
            if len(said) == half:
                assert not served.engine.log
                gate.opened.set()
    assert said == "0123456789abcdef"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_repeated_is_drawn_once(stream: bool) -> None:
    gate = Gate()
    with talk(before_step=gate) as (served, client):
        body = {"messages": [user("a")], "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            client.http.post(CHAT, json=body, timeout=0.2)
        wait_until(lambda: served.session(client.opened.id).num_abandoned == 1)
        gate.opened.set()
        joined = client.http.post(CHAT, json=body)
        again = client.http.post(CHAT, json=body, headers={"x-stainless-retry-count": "1"})
        assert joined.status_code == again.status_code == 200
        assert len(served.engine.submitted) == 1
        other = client.http.post(CHAT, json=body)  # not marked as a repetition
        assert other.status_code == 200 and len(served.engine.submitted) == 2
        keyed = [client.chat(user("k"), headers={"Idempotency-Key": "one"}) for _ in range(2)]
        assert keyed[0].json()["choices"] == keyed[1].json()["choices"] and len(served.engine.submitted) == 3
        clash = client.chat(user("other"), headers={"Idempotency-Key": "one"})
        assert clash.status_code == 400 and "Idempotency-Key" in clash.text
        assert len(client.record().trajectories) == 3


def test_a_conversation_that_is_edited_branches_where_it_differs() -> None:
    with talk() as (served, client):
        one = client.said(user("a"))
        two = client.said(user("a"), one, user("b"))
        client.said(user("a"), one, user("other"))
        client.said(user("a"), one, user("b"), two, user("c"))
        client.said(user("a"), {**one, "content": "never said"}, user("b"))
        trunk, branch, fresh = client.record().trajectories
    assert len(trunk.sample.turns) == 3 and (trunk.parent, trunk.num_shared_tokens) == (None, 0)
    assert branch.parent == trunk.sample.id and branch.num_shared_tokens == trunk.sample.turns[0]
    assert fresh.parent is None and "never said" in byte_tokenizer().decode(fresh.sample.prompt)
    masks = [trajectory.sample.loss_mask for trajectory in (trunk, branch, fresh)]
    assert sum(map(sum, masks)) == served.engine.num_drawn_tokens


def test_rewards_are_of_turns_and_of_the_episode() -> None:
    with talk() as (served, client):
        place = f"/sessions/{client.opened.id}"
        one = client.said(user("a"))
        client.said(user("a"), one, user("b"))
        assert client.http.post(f"{place}/reward", json={"reward": 0.25, "turn": -1}).status_code == 200
        assert client.http.post(f"{place}/reward", json={"reward": 2}).status_code == 200
        assert client.http.post(f"{place}/reward", json={"reward": 3}).status_code == 200
        assert client.http.post(f"{place}/reward", json={"reward": 1, "turn": 9}).status_code == 400
        for number in (b"NaN", b"1e39", b"-1e400"):
            assert client.http.post(f"{place}/reward", content=b'{"reward": %s}' % number).status_code == 400
        shown = client.http.get(place).json()["samples"][0]
        finished = client.http.post(f"{place}/finish", json={"status": "failed"})
        assert finished.status_code == 200 and client.http.get(place).status_code == 401  # its token is no longer valid
        (session,) = served.ended
    assert (session.reward, session.ended_by) == (3.0, "finish")
    assert session.trajectories[0].sample.turn_rewards == (0.0, 0.25) == tuple(shown["turn_rewards"])
    assert session.trajectories[0].sample.status is Status.FAILED


GARBAGE: list[tuple[str, bytes, int]] = [
    (CHAT, b"", 400),
    (CHAT, b"not json", 400),
    (CHAT, b"[1, 2]", 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [5]}', 400),
    (CHAT, b'{"messages": [{"content": "x"}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 100000}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', 400),
    (CHAT, b'{"messages": [{"role": "assistant", "content": "x"}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}], "tools": [7]}', 400),
    (CHAT, b"\xff\xfe", 400),
    ("/v1/completions", b'{"prompt": [1, 999999]}', 400),
    ("/v1/completions", b'{"prompt": ""}', 400),
    ("/generate", b'{"input_ids": [], "text": "x"}', 400),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": "x"}]}', 400),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": []}], "max_tokens": 2}', 400),
    ("/v1/messages", b'{"messages": [{"role": "assistant", "content": []}], "max_tokens": 2}', 400),
    ("/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": []}]}', 400),
    ("/v1/responses", b'{"input": []}', 400),
    ("/v1/nothing", b"{}", 404),
    (CHAT, b"x" * 3000, 413),
]


def test_garbage_gets_an_answer_that_says_what_is_wrong() -> None:
    with talk(max_body_bytes=2000) as (served, client):
        for path, body, status in GARBAGE:
            response = client.http.post(path, content=body)
            assert response.status_code == status, (path, body, response.text)
            assert response.json()["error"]["message"]
        assert client.http.get(CHAT).status_code == 405
        assert client.said(user("still there"))["content"].startswith("reply")
        assert len(served.engine.log) == 1


def test_ids_that_the_model_may_draw_are_taken_and_no_others() -> None:
    """A model may have more embeddings than its tokenizer has tokens, or fewer if tokens were added."""
    for vocab_size, status in ((300, 200), (299, 400)):
        with talk(say=lambda text: "yes", vocab_size=vocab_size) as (served, client):
            assert client.http.post("/v1/completions", json={"prompt": [1, 299]}).status_code == status
            asked = {"input_ids": [1, 299], "sampling_params": {"max_new_tokens": 2}}
            assert client.http.post("/generate", json=asked).status_code == status
            assert client.http.post("/v1/completions", json={"prompt": [1, -1]}).status_code == 400
    with endpoint(lambda text: "yes", vocab_size=256) as served:  # the template's own tokens are 256 and 257
        client = Client(served)
        refused = client.chat(user("a"))
        assert refused.status_code == 400 and "the token id 256" in refused.json()["error"]["message"]
        assert client.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_request_that_never_ends_holds_up_nobody() -> None:
    with talk() as (served, client):
        address = served.url.removeprefix("http://").rsplit(":", 1)
        with socket.create_connection((address[0], int(address[1]))) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
            token = client.opened.token.encode()
            half.sendall(b"Authorization: Bearer " + token + b"\r\n\r\n{")
            assert client.said(user("a"))["content"].startswith("reply")


def test_limits_are_told() -> None:
    with talk(max_sessions=2, max_session_turns=2, max_session_tokens=12) as (served, client):
        Client(served)
        with pytest.raises(RequestRefused, match="2 sessions are open"):
            served.server.open_session()
        refused = httpx.post(f"{served.url}/sessions", headers=OF_OWNER)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        whole = client.said(user("a"))["content"] + "."  # its end token counts too
        rest = client.chat(user("b")).json()["choices"][0]
        assert (len(rest["message"]["content"]), rest["finish_reason"]) == (12 - len(whole), "length")
        over = client.chat(user("c"))
        assert (over.status_code, over.json()["error"]["code"]) == (429, "turns")
    with talk(max_session_tokens=5) as (served, client):
        client.said(user("a"))
        assert client.chat(user("b")).json()["error"]["code"] == "tokens"


def test_a_session_ends_with_its_time() -> None:
    gate = Gate()
    with talk(before_step=gate, session_timeout_s=0.3) as (served, client):
        response = client.chat(user("never drawn"))
        assert response.status_code == 410 and "its time" in response.text
        gate.opened.set()
        assert served.ended[0].trajectories == () and "time" in served.ended[0].ended_by


def test_the_runs_sampling_overrides_or_refuses_the_requests() -> None:
    own = SamplingParams(0.7, 1.0, 0, CONTEXT_TOKENS, (257,))
    wishes = {"temperature": 0.1, "presence_penalty": 1.0, "tool_choice": "required"}
    with endpoint(say, policy="override", sampling=own) as served:
        Client(served).said(user("a"), **wishes)
        assert served.engine.samplings == [own]
    with talk(policy="refuse", sampling=own) as (served, client):
        assert "temperature = 0.7" in client.chat(user("a"), temperature=0.1).json()["error"]["message"]
        client.said(user("a"), temperature=0.7)


def test_requests_of_unequal_sampling_take_turns() -> None:
    """An engine uses one sampling at a time. A request need not wait for all requests of another sampling."""
    gate = Gate()
    with endpoint(lambda context: "x" * 300, before_step=gate) as served:
        fields = [{"temperature": 1.0, "max_tokens": 250}] * 2 + [{"temperature": 0.5, "max_tokens": 5}]
        clients = [Client(served) for _ in fields]
        threads = [
            threading.Thread(target=client.said, args=(user("a"),), kwargs=asked)
            for client, asked in zip(clients, fields, strict=True)
        ]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda number=number: served.mailbox.num_turns == number)
        gate.opened.set()
        for thread in threads:
            thread.join(60)
        lengths = [len(entry.tokens) for entry in served.engine.log]
    assert sorted(lengths) == [5, 250, 250] and lengths[0] == 5


def test_an_engine_that_is_gone_is_told() -> None:
    with talk() as (served, client):
        served.mailbox.close("the job ends")
        response = client.chat(user("a"))
        assert response.status_code == 503 and "the job ends" in response.text


def test_generate_takes_and_gives_ids() -> None:
    with talk() as (served, client):
        asked = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        first = client.http.post("/generate", json=asked).json()
        assert len(first["output_ids"]) == 4 and first["meta_info"]["finish_reason"]["type"] == "length"
        assert [entry[1] for entry in first["meta_info"]["output_token_logprobs"]] == first["output_ids"]
        more = [1, 2, *first["output_ids"], 9]
        client.http.post("/generate", json={"input_ids": more, "sampling_params": {"max_new_tokens": 2}})
        (trajectory,) = client.record().trajectories
    assert trajectory.sample.context[: len(more)] == tuple(more) and len(trajectory.sample.turns) == 2


def test_only_a_sessions_own_token_opens_it() -> None:
    with endpoint(say) as served:
        one, two = Client(served), Client(served)
        assert two.http.get(f"/sessions/{one.opened.id}").status_code == 401
        assert httpx.get(f"{served.url}/sessions/{one.opened.id}").status_code == 401
        assert httpx.get(f"{served.url}/sessions/{one.opened.id}", headers=OF_OWNER).status_code == 200
        assert httpx.get(f"{served.url}/sessions/none", headers=OF_OWNER).status_code == 404
        assert two.http.post("/sessions").status_code == 401
        made = httpx.post(f"{served.url}/sessions", headers=OF_OWNER, json={"metadata": 5})
        assert made.status_code == 201 and made.json()["base_url"].endswith("/v1")
        assert httpx.delete(made.json()["url"], headers=OF_OWNER).status_code == 204
        assert httpx.get(f"{served.url}/healthz").json() == {"status": "ok", "sessions": 2}


USER = {"role": "user", "content": "hi"}
REQUESTS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [USER]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, {"messages": [USER], "max_tokens": 5}),
    "/generate": (GenerateRequest, {"text": "hi"}),
}
OF_SDKS = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/messages": message_create_params.MessageCreateParamsBase,
}
OF_VLLM = (
    *(
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "bad_words",
        "min_tokens",
    ),
    *("allowed_token_ids", "use_beam_search", "chat_template", "add_generation_prompt", "documents", "prompt_logprobs"),
    *("echo", "length_penalty", "truncate_prompt_tokens", "continue_final_message", "logits_processors", "min_p"),
    *("repetition_penalty", "include_stop_str_in_output", "skip_special_tokens", "best_of", "thinking_token_budget"),
)
OF_SGLANG = ("regex", "ebnf", "json_schema", "structural_tag", "no_stop_trim", "lora_path", "custom_logit_processor")
OF_SGLANG_PARAMS = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens", "min_p", "regex"),
    *("json_schema", "ebnf", "structural_tag", "skip_special_tokens", "stop_regex", "no_stop_trim", "custom_params"),
)
OF_SGLANG_REQUESTS = (
    *("image_data", "lora_path", "top_logprobs_num", "token_ids_logprob", "logprob_start_len", "input_embeds"),
)
ODD = "odd"
"""A value of another type than the neutral value of any field."""


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(lambda text: "hello", policy="request") as found:
        yield found


@pytest.fixture(scope="module")
def overriding() -> Iterator[Endpoint]:
    with endpoint(lambda text: "hello", policy="override") as found:
        yield found


def post(at: Endpoint, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(at.url + path, json=body, headers=OF_OWNER, timeout=30)


def fields() -> list[tuple[str, str]]:
    found = [(path, name) for path, params in OF_SDKS.items() for name in params.__annotations__]
    beta = beta_message_create_params.MessageCreateParamsBase.__annotations__
    found += [("/v1/messages", name) for name in (*beta, "mcp_servers", "output_format") if name != "betas"]
    found += [(path, name) for path in ("/v1/chat/completions", "/v1/completions") for name in OF_VLLM + OF_SGLANG]
    found += [("/generate", name) for name in OF_SGLANG_REQUESTS]
    found += [("/generate", f"sampling_params.{name}") for name in OF_SGLANG_PARAMS]
    return list(dict.fromkeys(found))


def with_field(path: str, name: str, value: Any) -> dict[str, Any]:
    section, _, key = name.rpartition(".")
    return {**REQUESTS[path][1], **({section: {key: value}} if section else {key: value})}


def is_known(path: str, name: str) -> bool:
    kind = GenerateSampling if name.startswith("sampling_params.") else REQUESTS[path][0]
    return name.rpartition(".")[2] in kind.model_fields


def is_named(answer: httpx.Response, path: str, name: str) -> bool:
    error = answer.json()["error"]
    return answer.status_code == 400 and name in (error["message"] if path == "/v1/messages" else error["param"])


@pytest.mark.parametrize(("path", "name"), [case for case in fields() if not is_known(*case)])
def test_a_field_that_cannot_be_obeyed_is_named_and_a_harmless_one_is_taken(
    served: Endpoint, path: str, name: str
) -> None:
    answer, key = post(served, path, with_field(path, name, ODD)), name.rpartition(".")[2]
    assert answer.status_code == 200 if key in HARMLESS else is_named(answer, path, name), answer.text
    neutral = NEUTRAL.get(key, True if key in TRUE_BY_DEFAULT else None)
    assert post(served, path, with_field(path, name, neutral)).status_code == 200
    assert post(served, path, with_field(path, name, None)).status_code == 200


@pytest.mark.parametrize("name", ["frequency_penalty", "min_p", "min_tokens"])
def test_a_value_beside_the_neutral_one_is_refused(served: Endpoint, name: str) -> None:
    for value in (1.5, True, "0"):
        assert is_named(post(served, "/v1/completions", with_field("/v1/completions", name, value)), "", name)


@pytest.mark.parametrize("path", REQUESTS)
def test_wishes_are_passed_over_where_the_run_overrides_requests(overriding: Endpoint, path: str) -> None:
    for name in sorted(WISHES):
        assert post(overriding, path, with_field(path, name, ODD)).status_code == 200
    assert is_named(post(overriding, path, with_field(path, "guided_json", ODD)), path, "guided_json")


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/completions", {"add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_known_fields_with_values_that_cannot_be_obeyed(
    served: Endpoint, path: str, asked: dict[str, Any], param: str
) -> None:
    assert is_named(post(served, path, {**REQUESTS[path][1], **asked}), path, param)


WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [{"type": "function", "function": WEATHER}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **WEATHER}]},
    "/v1/messages": REQUESTS["/v1/messages"][1]
    | {"tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}]},
}


def test_tools_that_the_template_does_not_write_are_refused_in_sessions_too() -> None:
    with endpoint(lambda text: "yes", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") as served:
        session = served.server.open_session()
        for path, asked in WITH_TOOLS.items():
            for before in ("", f"/sessions/{session.id}"):
                answer = post(served, f"{before}{path}", asked)
                assert is_named(answer, path, "tools"), answer.text
                assert "does not write the tools that it is given" in answer.text
                assert post(served, f"{before}{path}", {**asked, "tools": []}).status_code == 200
        counted = {key: value for key, value in WITH_TOOLS["/v1/messages"].items() if key != "max_tokens"}
        assert is_named(post(served, "/v1/messages/count_tokens", counted), "/v1/messages", "tools")


def test_threads_are_refused_in_the_words_that_anthropics_client_knows(served: Endpoint) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key=OWNER, max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="m", max_tokens=5, messages=[USER], extra_body={"thread": {"type": "new"}})
    assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_an_item_of_a_response_that_was_cut_is_incomplete(served: Endpoint) -> None:
    answer = post(served, "/v1/responses", {"input": "hi", "max_output_tokens": 2}).json()
    assert (answer["status"], [item["status"] for item in answer["output"]]) == ("incomplete", ["incomplete"])
    assert answer["output"][0]["content"][0]["text"]


def test_the_model_is_described_as_each_client_reads_it(served: Endpoint) -> None:
    of_openai = openai.OpenAI(base_url=f"{served.url}/v1", api_key=OWNER, max_retries=0)
    (model,) = of_openai.models.list().data
    assert of_openai.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError, match="got 'another'; expected"):
        of_openai.models.retrieve("another")
    of_anthropic = anthropic.Anthropic(base_url=served.url, api_key=OWNER, max_retries=0)
    (found,) = of_anthropic.models.list().data
    assert (found.id, found.type) == (model.id, "model")
    assert of_anthropic.models.retrieve(model.id) == found
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
