"""HTTP to the server: answers, refusals, servers that are gone or silent, streams."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rltrain.errors import EngineError, EngineLost
from rltrain.rollout.servers.calls import Client, StreamFailure
from tests.unit.fake_sglang import FakeServer

LIMIT_S = 0.5


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    client = Client(LIMIT_S)
    client.connect(server.url, server.token)
    yield client
    client.close()


def body(*rids: str, max_new_tokens: int = 3) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "stop_token_ids": [], "ignore_eos": True, "stream_interval": 2}
    return {
        "rid": [*rids],
        "input_ids": [[1, 2]] * len(rids),
        "sampling_params": [sampling] * len(rids),
        "extra_key": "",
    }


def items(client: Client, count: int) -> list[Any]:
    return [client.inbox.get(timeout=5) for _ in range(count)]


def test_an_answer_is_parsed_where_it_is_json(client: Client) -> None:
    assert client.call("/pause_generation", {"mode": "in_place"})["success"] is True
    assert client.call("/flush_cache", {}) == "Cache flushed."
    assert client.call("/model_info") == {"success": True, "message": "Success", "weight_version": "default"}


def test_an_error_that_nobody_expects_ends_the_wait_for_a_stream(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio would keep it to itself until the task is collected."""
    monkeypatch.setattr("rltrain.rollout.servers.calls._lines", lambda response, limit_s: 1 / 0)
    client.generate(body("a"))
    (failure,) = items(client, 1)
    assert isinstance(failure, StreamFailure) and type(failure.error) is ZeroDivisionError


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineError), (422, EngineError), (500, EngineLost), (503, EngineLost)]
)
def test_a_refusal_is_an_error_and_a_broken_server_is_lost(
    server: FakeServer, client: Client, status: int, error: type[Exception]
) -> None:
    server.answers["/flush_cache"] = server.answers["/generate"] = (status, "because")
    with pytest.raises(error, match=f"/flush_cache of the SGLang server answered with status {status}: because"):
        client.call("/flush_cache", {})
    client.generate(body("a"))
    [failure] = items(client, 1)
    assert isinstance(failure, StreamFailure) and type(failure.error) is error


def test_a_silent_server_is_lost_when_the_limit_is_over(server: FakeServer, client: Client) -> None:
    server.hangs = True
    start = time.monotonic()
    with pytest.raises(EngineLost, match=r"/flush_cache of the SGLang server: no answer within 0\.5 s"):
        client.call("/flush_cache", {})
    assert LIMIT_S <= time.monotonic() - start < LIMIT_S + 2


def test_a_dead_server_is_lost_at_once_also_in_the_middle_of_a_call(server: FakeServer, client: Client) -> None:
    client.generate(body("a", max_new_tokens=10**6))
    items(client, 1)
    server.die()
    drained = items(client, 1)
    while not isinstance(drained[-1], StreamFailure):
        drained += items(client, 1)
    assert isinstance(drained[-1].error, EngineLost)
    with pytest.raises(EngineLost, match="/flush_cache"):
        client.call("/flush_cache", {})


def test_events_of_all_requests_arrive_as_they_happen(client: Client) -> None:
    client.generate(body("a", "b"))
    events = items(client, 4)
    assert [event["meta_info"]["id"] for event in events] == ["a", "b", "a", "b"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 1, 3, 3]
    assert time.monotonic() - client.last_event_s < 5
    time.sleep(0.05)
    assert client.inbox.empty()


def test_proxies_of_the_environment_are_ignored(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    client = Client(LIMIT_S)
    client.connect(server.url, server.token)
    assert client.call("/flush_cache", {}) == "Cache flushed."
    client.close()


def test_another_server_brings_nothing_of_the_one_before(server: FakeServer, client: Client) -> None:
    client.generate(body("a", max_new_tokens=10**6))
    items(client, 2)
    other = FakeServer()
    other.start()
    client.connect(other.url, other.token)
    client.generate(body("b"))
    assert {event["meta_info"]["id"] for event in items(client, 2)} == {"b"}
    other.kill()


def test_closing_is_quick_whatever_the_server_does(server: FakeServer, client: Client) -> None:
    server.hangs = True
    client.generate(body("a"))
    start = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - start < 2


def test_without_a_server_every_call_says_so(server: FakeServer, client: Client) -> None:
    client.disconnect()
    with pytest.raises(EngineLost, match="no SGLang server is connected"):
        client.call("/flush_cache", {})
    client.generate(body("a"))
    assert isinstance(items(client, 1)[0], StreamFailure)
