"""A reward function behind an URL: what it is sent, what it may answer, and what happens where it cannot."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rltrain.config import schema
from rltrain.rewards import judge
from rltrain.rewards.answers import Answer, Scorable
from rltrain.rewards.functions import await_calls, load_reward
from rltrain.rewards.scorer import Scores
from tests.unit.one_function import OneFunction

Reply = tuple[int, Any]
"""Status, and what is sent as JSON, or as it is if it is bytes."""


class Serving:
    """An HTTP server, what it was posted, and the headers of that."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        self.answer = answer
        self.posted: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.lock = threading.Lock()
        self.url = ""

    def reply(self, headers: Any, body: bytes) -> Reply:
        with self.lock:
            self.posted.append(json.loads(body))
            self.headers.append(headers)
            number = len(self.posted)
        return self.answer(self.posted[number - 1], number)


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Reply]) -> Iterator[Serving]:
    """`answer(what was posted, number of the request from 1)`."""
    state = Serving(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802
            status, content = state.reply(self.headers, self.rfile.read(int(self.headers["content-length"])))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", "http://elsewhere.invalid/score")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *request: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # of a client that waits no longer
                super().handle_error(*request)

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}/score"
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.001)


SAMPLE = Scorable("2+2?", "4", "four", messages=({"role": "user", "content": "2+2?"},), row={"level": 3})


def judged(url: str, *, retries: int = 3, timeout_s: float = 20.0, **options: Any) -> Answer:
    function = load_reward(schema.Reward(function=url, options=options, retries=retries, timeout_s=timeout_s))
    ((answer,),) = asyncio.run(await_calls(function, [[SAMPLE]], function.limit_s(timeout_s)))
    return answer


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (0.5, Answer(0.5)),
        (True, Answer(1.0)),
        ({"score": 2}, Answer(2.0)),
        ({"reward": 2, "clarity": 0.25, "why": "good"}, Answer(2.0, metrics={"clarity": 0.25})),
    ],
)
def test_what_a_judge_may_answer(content: Any, answer: Answer) -> None:
    with serving(lambda posted, number: (200, content)) as server:
        assert judged(server.url) == answer


def test_what_a_judge_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with serving(lambda posted, number: (200, 1)) as server:
        judged(server.url, token_env="JUDGE_TOKEN", payload={"rubric": "exact"})
    assert server.posted == [
        {
            "prompt": "2+2?",
            "response": "4",
            "label": "four",
            "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "row": {"level": 3},
            "rubric": "exact",
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_judge_that_is_busy_is_asked_again(status: int) -> None:
    with serving(lambda posted, number: (status, "busy") if number < 3 else (200, 1)) as server:
        assert judged(server.url, retries=2) == Answer(1.0)
    with serving(lambda posted, number: (status, "busy")) as server:
        assert judged(server.url, retries=2) == Answer(error=f'{server.url}, asked 3 times, answered {status}: "busy"')
        assert len(server.posted) == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((404, "no such path"), 'answered 404: "no such path"'),
        ((307, ""), "sends on to http://elsewhere.invalid/score, which is not followed; expected the address itself"),
        ((200, b"<html>"), "answered '<html>'; expected JSON: a number, or"),
        ((200, {"points": 1}), "expected JSON: a number, or"),
        ((200, {"score": "high"}), "returned str 'high' under 'score'; expected a number"),
        ((200, {"score": None}), "returned NoneType None under 'score'; expected a number"),
    ],
)
def test_what_is_wrong_is_told_and_not_asked_again(reply: Reply, reason: str) -> None:
    with serving(lambda posted, number: reply) as server:
        assert reason in str(judged(server.url).error)
        assert len(server.posted) == 1


def test_a_judge_that_cannot_be_reached() -> None:
    with serving(lambda posted, number: (200, 1)) as server:
        gone = server.url
    reason = str(judged(gone, retries=1).error)
    assert reason.startswith(f"{gone}, asked 2 times, cannot be reached (ConnectError")
    assert str(judged(gone, retries=0).error).startswith(f"{gone}, asked once, cannot be reached")


def test_a_judge_that_takes_too_long_costs_its_sample() -> None:
    end = threading.Event()

    def slow(posted: dict[str, Any], number: int) -> Reply:
        if posted["response"] == "slow":
            end.wait(60)
        return 200, 1

    with serving(slow) as server:
        function = load_reward(schema.Reward(function=server.url))
        with OneFunction(function, timeout_s=1, num_workers=4, retries=1) as scorer:
            scores = scorer.score([Scorable("p", text, "l") for text in ("a", "slow", "b")])
        end.set()
    assert scores == Scores([1.0, 0.0, 1.0], num_errors=0, num_timeouts=1)
    assert scores.first_failure is not None and "took longer than reward.timeout_s = 1" in scores.first_failure
    assert "Traceback" not in scores.first_failure


def test_as_many_requests_are_on_their_way_as_there_are_workers() -> None:
    """From one process."""
    meeting = threading.Barrier(3, timeout=60)

    def answer(posted: dict[str, Any], number: int) -> Reply:
        meeting.wait()
        return 200, 1

    with serving(answer) as server:
        function = load_reward(schema.Reward(function=server.url))
        with OneFunction(function, timeout_s=60, num_workers=3) as scorer:
            assert scorer.score([Scorable("p", str(n), "l") for n in range(6)]).rewards == [1.0] * 6
            assert len(scorer._workers[0].processes) == 1


def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.5)
    patient = judge.RemoteJudge("http://x", timeout_s=10, retries=8)
    assert patient.longest_s == 9 * 10 + (0.5 + 1 + 2 + 4 + 8 + 16 + 30 + 30)
