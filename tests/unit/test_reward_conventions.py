"""A function's signature decides what it is given and what its answers mean: ours, verl's, TRL's and slime's."""

import asyncio
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.rewards.answers import Answer, Scorable, as_answer
from rltrain.rewards.functions import RewardFunction, await_calls, call, load_reward
from rltrain.rewards.scorer import Scores
from tests.unit.one_function import OneFunction

MODULE = "tests.unit.peer_rewards"
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})


def reward(function: str, **options: Any) -> RewardFunction:
    return load_reward(schema.Reward(function=f"{MODULE}.{function}", options=options))


def answers(function: RewardFunction, samples: Sequence[Scorable]) -> list[Answer]:
    """As a worker gets them, with samples that went to and fro as JSON."""
    fields = function.convention.fields
    arrived = [Scorable(**json.loads(json.dumps(sample.message(fields)))) for sample in samples]
    batches = [[sample] for sample in arrived]
    if function.convention.batched:
        batches = [list(batch) for _, batch in groupby(arrived, key=lambda sample: sample.response_mask)]
    if function.asynchronous:
        return [a for batch in asyncio.run(await_calls(function, batches, limit_s=60)) for a in batch]
    return [a for batch in batches for a in call(function, batch)]


def values(function: RewardFunction, samples: Sequence[Scorable]) -> list[float | None]:
    return [answer.score for answer in answers(function, samples)]


def test_our_functions_take_as_much_as_they_name() -> None:
    function = reward("ours", scale=3.0)
    assert function.convention.columns.every and not function.convention.takes_label
    row = {"solution": "4", "source": "x"}
    assert values(function, [Scorable("p", text, "", row=row) for text in ("4", "5")]) == [3.0, 0.0]


def test_our_functions_may_use_verl_s_names() -> None:
    function = reward("ours_with_verl_s_names")
    assert values(function, [Scorable("p", "r", "pr"), Scorable("p", "r", "r")]) == [1.0, 0.0]
    assert not function.convention.columns.any


def test_our_functions_get_the_conversation_as_messages() -> None:
    function = reward("ours_with_messages")
    roles = ["system", "user", "assistant"]
    assert values(function, [Scorable("p", "r", json.dumps(roles), messages=CHAT)]) == [1.0]
    assert values(function, [Scorable("p", "r", json.dumps(roles[1:]))]) == [1.0]


def conversation(*rewards: float) -> Scorable:
    turns = [
        {"message": {"role": "assistant", "content": "a"}, "replies": [{"role": "user", "content": "ok"}], "reward": r}
        for r in rewards
    ]
    return Scorable("p", "a", "", turns=turns, env_reward=sum(rewards))  # type: ignore[arg-type]


def test_a_list_rewards_turn_by_turn() -> None:
    (answer,) = answers(reward("per_turn"), [conversation(0.0, 1.0, 4.0)])
    assert answer == Answer(5.5, turns=[1.0, 1.5, 3.0])


def test_a_score_beside_turns_is_the_last_one_s() -> None:
    (answer,) = answers(reward("per_turn_and_in_the_end"), [conversation(0.0, 0.0)])
    assert answer == Answer(12.0, turns=[1.0, 11.0], metrics={"length": 1.0})


def test_the_environment_s_own_reward() -> None:
    function = load_reward(schema.Reward(function="environment"))
    with OneFunction(function, timeout_s=1) as scorer:
        scores = scorer.score([Scorable("p", "r", ""), Scorable("p", "r", "", env_reward=0.25), conversation(1.0, 2.0)])
    assert scores == Scores([0.0, 0.25, 3.0], 0, 0, turn_rewards={2: [1.0, 2.0]})


def test_verl_s_compute_score() -> None:
    function = reward("verl", bonus=0.5)
    assert function.convention.columns.required == {"data_source"} and function.convention.columns.label
    row = {"data_source": "countdown", "extra_info": {"index": 7}}
    samples = [
        Scorable("p", "24", "", label_value={"target": ["24"]}, row=row),
        Scorable("p", "25", "", label_value={"target": ["24"]}, row={"data_source": "countdown", "extra_info": None}),
    ]
    assert answers(function, samples) == [
        Answer(1.5, metrics={"index": 7.0, "acc": 1.0}),
        Answer(0.5, metrics={"index": -1.0, "acc": 0.0}),
    ]


def test_options_may_take_the_place_of_a_column() -> None:
    assert reward("verl", data_source="countdown").convention.columns.required == set()
    assert reward("trl_scheduled", difficulty=3).convention.columns.required == set()


@pytest.mark.parametrize("name", ["verl_short", "verl_async"])
def test_other_forms_of_verl_s(name: str) -> None:
    row = {"data_source": "x"}
    samples = [Scorable("p", text, "", label_value="4", row=row) for text in ("4", "5")]
    assert values(reward(name), samples) == [1.0, 0.0]


def groups(*texts: Sequence[str], **fields: Any) -> list[Scorable]:
    """Samples of several prompts; the response mask stands for the group."""
    return [
        Scorable("p", text, "", response_mask=[bool(group % 2)], response_ids=[1, 2, 3], group=group, **fields)
        for group, of_group in enumerate(texts)
        for text in of_group
    ]


def scored_in_a_worker(function: RewardFunction, samples: Sequence[Scorable]) -> Scores:
    with OneFunction(function, timeout_s=60, num_workers=1, calls_in_flight=4) as scorer:
        return scorer.score(samples)


def test_batches_are_the_samples_of_a_prompt() -> None:
    samples = groups(["4", "5"], ["4", "4", "5"], label_value="4", row={})
    assert scored_in_a_worker(reward("verl_batch"), samples).rewards == [2.0, 0.0, 3.0, 3.0, 0.0]
    assert scored_in_a_worker(reward("trl_async"), samples).rewards == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_trl_s_functions_get_columns_and_may_say_none() -> None:
    function = reward("trl")
    columns = function.convention.columns
    assert (columns.required, columns.every, function.convention.takes_label) == ({"solution"}, True, False)
    samples = groups(["4", "5"], row={"solution": "4", "prompt": "p", "other": 1})
    samples += groups([], ["4"], row={"solution": None})
    scores = scored_in_a_worker(function, samples)
    assert scores == Scores([4.0, 3.0, 0.0], 0, 0, skipped=frozenset({2}), metrics={"group": (4.0, 2)})


def test_trl_s_functions_need_no_more_than_ids() -> None:
    assert values(reward("trl_by_ids"), groups(["a", "b"], ["c"], row={})) == [3.0, 3.0, 3.0]


def test_completions_of_chats_are_messages() -> None:
    sample = Scorable("p", "4", "", messages=CHAT, row={"solution": "4"})
    prepared = reward("trl").call([sample]).named
    assert prepared["prompts"] == [CHAT] and prepared["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_trl_s_functions_may_name_what_they_want() -> None:
    function = reward("trl_scheduled")
    columns = function.convention.columns
    assert (columns.required, columns.optional, columns.every) == ({"difficulty"}, {"penalty"}, False)
    assert [a.score for a in call(function, [Scorable("p", "r", "", step=100, row={"difficulty": 20})])] == [127.0]
    row = {"difficulty": 20, "penalty": 1, "of_another_function": 5}
    assert [a.score for a in call(function, [Scorable("p", "r", "", step=100, row=row)])] == [121.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trl_too_few", "returned 1 rewards for 2 samples; expected a list with a number for each"),
        ("trl_raising", "ValueError: could not convert string to float: 'x'"),
    ],
)
def test_a_batch_fails_as_one(name: str, reason: str) -> None:
    failed = answers(reward(name), groups(["1", "x"], row={}))
    assert len(failed) == 2 and all(reason in str(answer.error) for answer in failed)


def test_slime_s_functions_get_arguments_and_a_sample() -> None:
    function = reward("slime", scale=2.0, reward_key="points", metadata_key="meta")
    sample = Scorable(
        "p", "4", "", label_value={"answer": "4"}, row={"meta": {"level": 3}}, prompt_ids=[1, 2],
        response_ids=[3, 4, 5], response_mask=[True, False, True], truncated=True,
    )  # fmt: skip
    (answer,) = answers(function, [sample])
    expected = {"length": 3, "cut": 1, "drawn": 2, "tokens": 5, "level": 3, "typed": 0, "absent": 5, "score": -1}
    assert answer == Answer(2.0, metrics=expected)


def test_what_slime_s_functions_read_of_args_stands_in_the_options() -> None:
    samples = [Scorable("p", "4", "")]
    (failed,) = answers(reward("slime_reading_what_is_not_there"), samples)
    assert "args has no 'threshold'; what the function reads of args stands in reward.options" in str(failed.error)
    assert values(reward("slime_reading_what_is_not_there", threshold=4), samples) == [4.0]


def test_slime_s_functions_of_groups() -> None:
    first = [Scorable("p", "r", "", response_ids=[1] * length, response_mask=[True]) for length in (1, 3)]
    second = [Scorable("p", "r", "", response_ids=[1, 2], response_mask=[False])]
    assert values(reward("slime_group"), [*first, *second]) == [0.0, 1.0, 1.0]


def test_calls_of_an_asynchronous_function_are_in_flight_together() -> None:
    samples = [Scorable("p", str(n), "") for n in range(12)]
    with OneFunction(reward("together"), timeout_s=60, num_workers=1, calls_in_flight=4) as scorer:
        assert set(scorer.score(samples).rewards) == {4.0}


@pytest.mark.parametrize(
    ("response", "errors", "timeouts"), [("sleep", 0, 1), ("die", 1, 0), ("exit", 1, 0), ("block", 0, 1)]
)
def test_one_of_many_calls_in_flight_costs_its_own_sample(response: str, errors: int, timeouts: int) -> None:
    """Also where it takes the process along, or holds it up."""
    samples = [Scorable("p", text, "") for text in ("a", "b", response, "c")]
    with OneFunction(reward("together"), timeout_s=1, num_workers=1, calls_in_flight=4) as scorer:
        scorer.score(samples[:1])
        scores = scorer.score(samples)
    assert (scores.num_errors, scores.num_timeouts) == (errors, timeouts)
    assert [bool(number) for number in scores.rewards] == [True, True, False, True]


numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=6), st.none() | numbers, st.booleans())
def test_rewards_of_turns_add_up_to_the_reward(turns: list[float], score: float | None, as_tuple: bool) -> None:
    returned: Any = {"turns": tuple(turns) if as_tuple else turns} | ({} if score is None else {"score": score})
    answer = as_answer(returned, len(turns))
    assert answer.turns and sum(answer.turns) == pytest.approx(answer.score, abs=1e-6)
    assert answer.turns[:-1] == turns[:-1]
    assert as_answer(returned, len(turns) + 1).error
