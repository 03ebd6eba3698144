"""Several reward functions: their weighted sum, each with its own scores; what a config may ask for of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.errors import ConfigError, RewardError
from rltrain.planning.validation import check_config
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import RewardFunction
from rltrain.rewards.scorer import Scorer, Scores, combined
from tests.unit.schedule_configs import make_config

MODULE = "tests.unit.user_rewards"


def section(*parts: dict[str, Any], **reward: Any) -> schema.Reward:
    return schema.Reward(functions=tuple(schema.RewardPart(**part) for part in parts), **reward)


def test_the_reward_is_the_weighted_sum_and_each_function_has_its_scores() -> None:
    parts = (
        {"function": "exact_match", "weight": 2.0},
        {"function": f"{MODULE}:misbehave", "name": "own", "weight": -0.5},
        {"function": f"{MODULE}.whole", "weight": 0.0, "options": {"separator": ""}},
    )
    scored: list[None] = []
    with Scorer.of(section(*parts, timeout_s=60, num_workers=1), lambda: scored.append(None)) as scorer:
        scores = scorer.score([Scorable("", text, text) for text in ("half", "raise", "int")])
    assert scores.rewards == [1.75, 2.0, 0.5]
    assert list(scores.by_function) == ["exact_match", "own", "whole"]
    assert scores.by_function["own"] == Scores([0.5, 0.0, 3.0], num_errors=1, num_timeouts=0)
    assert scores.by_function["exact_match"] == scores.by_function["whole"] == Scores([1.0] * 3, 0, 0)
    assert len(scored) == 6


def test_several_numbers_of_one_function_are_rewards() -> None:
    of_answer = {"function": f"{MODULE}:graded"}
    parts = ({**of_answer, "score_key": "right", "name": "right"}, {**of_answer, "score_key": "short", "name": "short"})
    with Scorer.of(section(*parts, timeout_s=60, num_workers=1)) as scorer:
        scores = scorer.score([Scorable("", text, "ab") for text in ("ab", "abc")])
    assert scores.rewards == [1.0 - 0.2, 0.0 - 0.3]
    with Scorer.of(schema.Reward(**of_answer, score_key="short", timeout_s=60, num_workers=1)) as scorer:
        assert scorer.score([Scorable("", "ab", "ab")]).rewards == [-0.2]


def test_one_function_alone_has_no_name() -> None:
    with Scorer.of(schema.Reward()) as scorer:
        scores = scorer.score([Scorable("", "a", "a")])
    assert scores.rewards == [1.0] and list(scores.by_function) == [""]


def test_a_function_that_cannot_be_loaded_is_named_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"reward.functions.1.function: 'nothing' is unknown"):
        Scorer.of(section({"function": "exact_match"}, {"function": "nothing"}))
    with pytest.raises(ConfigError, match=r"reward.functions.0.options \{'x': 1\}: got an unexpected keyword"):
        Scorer.of(section({"function": "exact_match", "options": {"x": 1}}))


def function(title: str, weight: float) -> RewardFunction:
    return RewardFunction("exact_match", print, title=title, weight=weight)


finite = st.floats(-100, 100)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_turns_add_up_to_the_whole_reward(data: st.DataObject, num_turns: int, num_functions: int) -> None:
    weights = data.draw(st.lists(finite, min_size=num_functions, max_size=num_functions))
    scores = []
    for _ in weights:
        turns = data.draw(st.none() | st.lists(finite, min_size=num_turns, max_size=num_turns))
        reward = data.draw(finite) if turns is None else sum(turns)
        scores.append(Scores([reward], 0, 0, turn_rewards={} if turns is None else {0: turns}))
    whole = combined([function(str(n), weight) for n, weight in enumerate(weights)], scores)
    assert len(whole.turn_rewards) == any(of.turn_rewards for of in scores)
    for turns in whole.turn_rewards.values():
        assert len(turns) == num_turns
        assert sum(turns) == pytest.approx(whole.rewards[0], abs=1e-6)


def test_a_sum_that_float32_cannot_hold_ends_the_job_with_its_reason() -> None:
    with pytest.raises(RewardError, match=r"the weighted sum of its parts is 3e\+39 for a response; expected a finite"):
        combined([function("a", 10.0)], [Scores([3e38], 0, 0)])


def test_a_sample_that_no_function_is_for_is_unscored() -> None:
    first, second = (Scores([0.0] * 3, 0, 0, skipped=frozenset(skipped)) for skipped in ({0, 1}, {1, 2}))
    assert combined([function("a", 1.0), function("b", 1.0)], [first, second]).skipped == {1}


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ({"function": "math"}, "math"),
        ({"function": "a.b:score"}, "score"),
        ({"function": "rewards/own.py:score"}, "score"),
        ({"function": "a.b.score"}, "score"),
        ({"function": "https://judge.example.org:8000/v1/score"}, "judge_example_org"),
        ({"function": "math", "name": "x"}, "x"),
    ],
)
def test_a_function_without_a_name_has_its_own(part: dict[str, Any], title: str) -> None:
    assert schema.RewardPart(**part).title == title


def parts(*given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return given


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"function": "exact_match", "functions": parts({"function": "math"})},
            "reward.function: got 'exact_match' beside reward.functions; expected one of the two",
        ),
        ({"options": {"a": 1}, "functions": parts({"function": "math"})}, "reward.options: got {'a': 1} beside"),
        ({"functions": parts({"function": "m.f"}, {"function": "n.f"})}, "reward.functions: 2 are called 'f'"),
        ({"functions": parts({"function": "m.mean"})}, "reward.functions.0.name: got 'mean'; expected letters, digits"),
        ({"functions": parts({"function": "math", "name": "a b"})}, "reward.functions.0.name: got 'a b'"),
        ({"functions": parts({"function": "math", "name": "a_errors"})}, "nothing that ends in _errors"),
        ({"functions": parts({"function": "math", "weight": 0.0})}, "reward.functions: every weight is 0"),
        ({"function": "http:///score"}, "got 'http:///score'; expected an URL with a host"),
    ],
)
def test_what_cannot_be_meant_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(make_config(reward=reward))
    assert message in str(refusal.value)


def test_rewards_that_compare_need_labels() -> None:
    data = {"train": {"path": "train.jsonl", "label_key": None}}
    with pytest.raises(ConfigError, match="data.train.label_key: got null, but the reward exact_match compares"):
        check_config(make_config(data=data))
    check_config(make_config(data=data, reward={"function": "environment"}))
