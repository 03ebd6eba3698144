"""Odd numbers in requests, before an engine that really draws: none ends it, and none changes what others are told."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rltrain.rollout.embedded import EmbeddedEngine
from tests.rollout_models import load_engine, write_checkpoint
from tests.talking_engine import OWNER, Endpoint, byte_tokenizer, endpoint

CONTEXT_TOKENS = 128
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
    """The weights of a model, and an endpoint that it draws for."""
    path = write_checkpoint(folder, "qwen3", vocab_size=len(byte_tokenizer()), max_position_embeddings=CONTEXT_TOKENS)
    engine: EmbeddedEngine
    engine, parameters = load_engine(path, max_context_tokens=CONTEXT_TOKENS)
    return parameters, endpoint(lambda text: "", context_tokens=CONTEXT_TOKENS, drawn_by=engine, max_sessions=10**6)


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
    """Sends all values at once, beside a request whose tokens are known."""
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
    for field, values in bad.items():
        for value in values:
            status, answer = post(
                served, path, "{" + BODIES[path] + f'"{field}": {value}' + "}" * path.count("gen") + "}"
            )
            assert status == 400 and field in answer["error"]["message"], (value, answer)
    for field, value in (("temperature", "0.001"), ("temperature", "1e3"), ("top_p", "1e-6"), ("top_k", "-1")):
        status, answer = post(served, path, "{" + BODIES[path] + f'"{field}": {value}' + "}" * path.count("gen") + "}")
        assert status == 200, (field, value, answer)


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
