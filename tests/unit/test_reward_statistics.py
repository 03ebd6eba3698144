"""Reward metrics of a step: the same from chunks and ranks as from the whole."""

import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.experience import Experience
from rltrain.rewards.scorer import Scores
from rltrain.roles.reward_statistics import RewardStatistics, is_of_one_function
from tests.unit.packed_experience import packed_experience

samples = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 9), st.booleans()), min_size=1, max_size=12)
Sample = tuple[float, int, bool]


def scored(
    part: list[Sample], errors: int = 0, timeouts: int = 0, failure: str | None = None
) -> tuple[Experience, Scores]:
    """Samples of (reward, response tokens, truncated), each behind a prompt of three tokens, scored by one function."""
    rewards = [reward for reward, _, _ in part]
    experience = packed_experience([(3, length) for _, length, _ in part]).with_fields(
        rewards=torch.tensor(rewards), truncated=torch.tensor([cut for _, _, cut in part], dtype=torch.bool)
    )
    return experience, Scores(rewards, by_function={"": Scores(rewards, errors, timeouts, failure)})


def metrics_of(by_rank: list[list[list[Sample]]]) -> dict[str, float]:
    """By rank its chunks; every rank counts an error in its first chunk."""
    records = []
    for chunks in by_rank:
        of_rank = RewardStatistics()
        for number, chunk in enumerate(chunks):
            of_rank.add(*scored(chunk, errors=int(number == 0)))
        records.append(of_rank.record())
    return RewardStatistics.metrics(records)


def test_the_metrics_are_what_they_are_called():
    part = [(1.0, 4, False), (0.0, 2, True), (0.5, 6, False)]
    of_rank = RewardStatistics()
    of_rank.add(*scored(part, errors=2, timeouts=1))
    assert RewardStatistics.metrics([of_rank.record()]) == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": statistics.pstdev([1.0, 0.0, 0.5]),
            "response_length_mean": 4.0,
            "response_length_max": 6.0,
            "truncated_ratio": 1 / 3,
            "reward_errors": 2,
            "reward_timeouts": 1,
            "reward_unscored": 0,
        }
    )


def test_what_each_source_got_and_earned():
    """Two ranks, of which one has no sample of the second source."""
    ranks = [RewardStatistics(), RewardStatistics()]
    for of_rank, sources, rewards in ((ranks[0], ["a", "b"], [1.0, 0.5]), (ranks[1], ["a", "a"], [0.0, 0.5])):
        experience, scores = scored([(reward, 1, False) for reward in rewards])
        of_rank.add(experience, scores)
        of_rank.add_sources(sources, scores.rewards)
    metrics = RewardStatistics.metrics([json.loads(json.dumps(of_rank.record())) for of_rank in ranks])
    of_sources = {name: value for name, value in metrics.items() if "/" in name}
    assert of_sources == {"reward_mean/a": 0.5, "reward_mean/b": 0.5, "share/a": 0.75, "share/b": 0.25}
    assert is_of_one_function("reward_mean/a") and not is_of_one_function("share/a"), "evaluations report the former"


@given(samples, st.data())
def test_chunks_and_ranks_add_up_to_the_whole(whole, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=3, max_size=3)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    together = metrics_of([[whole]])
    apart = metrics_of([parts[:2], parts[2:]])
    assert apart.pop("reward_errors") == 2 and together.pop("reward_errors") == 1
    assert apart == pytest.approx(together, abs=1e-6)
    assert together["reward_mean"] == pytest.approx(statistics.fmean(reward for reward, _, _ in whole), abs=1e-6)


def test_equal_rewards_have_no_spread():
    assert metrics_of([[[(0.1, 1, False)] * 3]])["reward_std"] == pytest.approx(0, abs=1e-6)


def of_two_functions(numbers: list[float], skipped: frozenset[int] = frozenset()) -> RewardStatistics:
    """The function "form" fails on one sample; "answer" is not for those that are `skipped`, and counts steps."""
    experience = packed_experience([(3, 2)] * len(numbers)).with_fields(rewards=torch.tensor(numbers))
    form = Scores([0.0] * len(numbers), 1, 0, "no text")
    answer = Scores(numbers, 0, 0, skipped=skipped, metrics={"steps": (6.0, 2), "mean": (1.0, 1), "a/b c": (3.0, 3)})
    of_rank = RewardStatistics()
    of_rank.add(experience, Scores(numbers, by_function={"form": form, "answer": answer}))
    return of_rank


def test_every_function_has_metrics_of_its_own():
    ranks = [of_two_functions([1.0, 0.0]), of_two_functions([1.0, 1.0, 0.0], frozenset({2}))]
    metrics = RewardStatistics.metrics([of_rank.record() for of_rank in ranks])
    of_functions = {name: value for name, value in metrics.items() if is_of_one_function(name)}
    assert of_functions == pytest.approx(
        {
            "reward_form": 0.0,
            "reward_form_errors": 2,
            "reward_form_timeouts": 0,
            "reward_answer": 3 / 4,
            "reward_answer_errors": 0,
            "reward_answer_timeouts": 0,
            "reward_answer_steps": 3.0,
            "reward_answer_mean_": 1.0,
            "reward_answer_a_b_c": 1.0,
        }
    )
    assert metrics["reward_errors"] == 2 and metrics["reward_mean"] == pytest.approx(3 / 5)
    assert ranks[0].first_failures == {"form": "no text"}


def test_greedy_samples_are_reported_apart():
    part = [(1.0, 4, False), (7.0, 9, True), (0.5, 2, False)]
    of_rank = RewardStatistics(is_greedy=lambda _: torch.tensor([False, True, False]))
    of_rank.add(*scored(part, errors=1))
    metrics = RewardStatistics.metrics([of_rank.record()])
    alone = RewardStatistics()
    alone.add(*scored([part[0], part[2]], errors=1))
    assert metrics.pop("greedy_reward_mean") == 7.0
    assert metrics == RewardStatistics.metrics([alone.record()])
    assert of_rank.sums["samples"] == 3, "failures are judged by all that were scored"


def test_what_stands_in_a_record_can_be_sent_as_json():
    record = of_two_functions([1.0]).record()
    assert RewardStatistics.metrics([json.loads(json.dumps(record))]) == RewardStatistics.metrics([record])
