"""What a reward worker loads in its first call costs no sample, and hanging there holds up nobody for long."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rltrain.config import schema
from rltrain.rewards import worker
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import RewardFunction, load_reward
from rltrain.rewards.scorer import Scores
from tests.unit.one_function import OneFunction


def samples(*responses: str) -> list[Scorable]:
    return [Scorable(prompt="p", response=response, label="l") for response in responses]


class Answering:
    """Stands for worker processes: what each call of `_ask` was about, in which process, and what came of it.

    `outcome(sample, calls so far in this process)` gives the seconds that the call takes, or raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Callable[[str, int], float]) -> None:
        self.outcome = outcome
        self.asked: list[tuple[int, str, float]] = []
        """Process, response and limit."""
        self.num_processes = self.num_calls = 0
        monkeypatch.setattr(worker, "start_worker", self.start)
        monkeypatch.setattr(worker, "kill_worker", lambda process: None)
        monkeypatch.setattr(worker, "_ask", self.ask)

    def start(self, *_: Any, **__: Any) -> SimpleNamespace:
        self.num_processes, self.num_calls = self.num_processes + 1, 0
        return SimpleNamespace(poll=lambda: None)

    def ask(self, process: Any, message: dict[str, Any], limit_s: float, _: Any) -> dict[str, Any]:
        if "function" in message:
            return {"ready": True}
        ((sample,),) = message["calls"]
        self.asked.append((self.num_processes, sample["response"], limit_s))
        seconds = self.outcome(sample["response"], self.num_calls)
        self.num_calls += 1
        if seconds > limit_s:
            raise TimeoutError
        return {"answers": [[{"score": 1.0}]], "seconds": seconds}

    def score(self, *responses: str) -> list[float]:
        function = RewardFunction("user:function", print)
        return OneFunction(function, timeout_s=5, num_workers=1).score(samples(*responses)).rewards


def test_imports_of_the_first_call_are_not_on_a_sample_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 0.1 if calls else 60)
    assert answering.score("a", "b", "c") == [1.0, 1.0, 1.0]
    assert answering.asked == [(1, "a", 120), (1, "a", 5), (1, "b", 5), (1, "c", 5)]


def test_what_a_process_loads_in_its_first_call_costs_no_sample() -> None:
    with OneFunction(
        load_reward(schema.Reward(function="tests.unit.user_rewards:loading_at_first")), timeout_s=2, num_workers=1
    ) as scorer:
        assert scorer.score(samples("a", "b")) == Scores([1.0, 1.0], num_errors=0, num_timeouts=0)


def test_a_first_call_within_a_sample_s_time_is_the_sample_s(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 4.9)
    assert answering.score("a", "b") == [1.0, 1.0]
    assert answering.asked == [(1, "a", 120), (1, "b", 5)]


def test_a_sample_has_no_more_time_in_a_first_call_than_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 60 if response == "slow" else 0.1)
    assert answering.score("slow", "a", "slow", "b") == [0.0, 1.0, 0.0, 1.0]
    assert [response for _, response, limit_s in answering.asked if limit_s > 5] == ["slow", "a", "a"]


def test_a_worker_started_anew_is_warmed_up_with_a_sample_that_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that took longest, for it is the one that met the imports; those that hang have their own time alone."""
    seconds = {"early": 0.1, "imports": 3.0, "hangs": 1e9, "late": 0.2}
    answering = Answering(monkeypatch, lambda response, calls: seconds[response])
    assert answering.score("early", "imports", "hangs", "hangs", "late") == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert answering.asked[2:] == [
        (1, "hangs", 5),
        *((2, "imports", 120), (2, "hangs", 5)),
        *((3, "imports", 120), (3, "late", 5)),
    ]


def test_a_function_that_always_hangs_costs_little_more_than_its_samples_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Answering(monkeypatch, lambda response, calls: 1e9)
    assert answering.score(*"x" * 100) == [0.0] * 100
    assert [limit_s for *_, limit_s in answering.asked[:6]] == [120, 15, 5, 5, 5, 5]
    assert sum(limit_s for *_, limit_s in answering.asked) < 100 * 5 + 135


def test_a_function_that_hangs_from_some_time_on_costs_little_more_either(monkeypatch: pytest.MonkeyPatch) -> None:
    answering: Answering
    answering = Answering(monkeypatch, lambda response, calls: 0.1 if len(answering.asked) < 9 else 1e9)
    assert sum(answering.score(*"x" * 100)) == 8
    assert sum(limit_s for *_, limit_s in answering.asked[8:]) < 102 * 5 + 135
