"""Every field of a request is obeyed, harmless, or refused by its name, in all five APIs."""

from collections.abc import Iterator
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
from rltrain.endpoint.service import HARMLESS, NEUTRAL, TRUE_BY_DEFAULT, WISHES
from tests.talking_engine import OWNER, Endpoint, endpoint

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
    "image_data",
    "lora_path",
    "top_logprobs_num",
    "token_ids_logprob",
    "logprob_start_len",
    "input_embeds",
)
ODD = "odd"
"""Of another type than any field's neutral value."""


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(lambda text: "hello", policy="request") as found:
        yield found


@pytest.fixture(scope="module")
def overriding() -> Iterator[Endpoint]:
    with endpoint(lambda text: "hello", policy="override") as found:
        yield found


def post(at: Endpoint, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(at.url + path, json=body, headers={"Authorization": f"Bearer {OWNER}"}, timeout=30)


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
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 5,
        "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
    },
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
