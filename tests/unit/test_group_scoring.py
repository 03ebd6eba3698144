"""Rewards of groups while their engine draws others: what counts, what travels with the samples, what is reported."""

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, RewardError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.group_filter import FAILED, load_group_filter
from rltrain.rewards.scorer import PendingScores, Scorer, Scores
from rltrain.roles.group_scoring import GroupScoring
from rltrain.roles.reward_statistics import RewardStatistics
from rltrain.roles.role import SampleLog
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups

DIFFER = schema.DynamicSampling()
SAMPLES = [Scorable("2+2", text, "4") for text in ("4", "5")]


def scores(*rewards: float, errors: int = 0) -> Scores:
    return Scores([*rewards], by_function={"": Scores([*rewards], num_errors=errors)})


def by_length(prompt: str, responses: list[str], rewards: list[float], label: str) -> object:
    """A user's filter, which says what the label asks for."""
    assert (prompt, len(responses)) == ("2+2", len(rewards))
    return {"keep": True, "drop": False, "why": "too easy!", "wrong": None}[label] if label != "raise" else 1 / 0


@pytest.mark.parametrize(
    ("rewards", "errors", "reason"),
    [
        ((1.0, 0.0), 0, None),
        ((1.0, 1.0), 0, "zero_std_1.0"),
        ((0.0, 0.0), 0, "zero_std_0.0"),
        ((0.1 + 0.2, 0.3), 0, "zero_std_0.3"),
        ((0.0, 0.0), 1, "zero_std_0.0"),
        ((0.0, 0.0), 2, FAILED),
    ],
)
def test_groups_count_whose_rewards_differ_in_training(rewards, errors, reason):
    assert load_group_filter(DIFFER)(SAMPLES, scores(*rewards, errors=errors)) == reason


@pytest.mark.parametrize(("label", "reason"), [("keep", None), ("drop", "filter"), ("why", "too_easy_")])
def test_a_filter_of_ones_own_names_its_reason(label, reason):
    own = load_group_filter(schema.DynamicSampling(filter=f"{__name__}:by_length"))
    assert own([sample._replace(label=label) for sample in SAMPLES], scores(1.0, 1.0)) == reason


@pytest.mark.parametrize(
    ("label", "message"), [("wrong", "returned None; expected true"), ("raise", "raised ZeroDivision")]
)
def test_a_filter_that_fails_ends_the_run_by_name(label, message):
    own = load_group_filter(schema.DynamicSampling(filter=f"{__name__}:by_length"))
    with pytest.raises(RewardError, match=f"dynamic_sampling.filter: .*by_length' {message}"):
        own([sample._replace(label=label) for sample in SAMPLES], scores(1.0, 1.0))


def test_an_unknown_filter_is_refused():
    with pytest.raises(ConfigError, match="dynamic_sampling.filter: 'rewards_difer' is unknown"):
        load_group_filter(schema.DynamicSampling(filter="rewards_difer"))


def test_scores_survive_a_checkpoint():
    turns = Scores([1.5, 0.0], 1, 0, "why", {0: [1.0, 0.5]}, frozenset({1}), {"length": (3.5, 2)})
    parts = {"a": turns, "b": Scores([0.1, 0.2], 0, 1)}
    whole = Scores([1.5, 0.0], turn_rewards={0: [1.0, 0.5]}, skipped=frozenset({1}), by_function=parts)
    again = Scores.of_record(json.loads(json.dumps(whole.record())))
    assert again == whole and again.by_function["a"].first_failure == "why"


def group_at(position: int, *lengths: int) -> SampleGroup:
    """Two prompt tokens, and responses of these lengths."""
    return SampleGroup(
        position,
        row=position,
        samples=tuple(
            Sample(10 * position + i, (1, 2), seed=0).drawn([7] * n, [-0.5] * n, [3] * n, Status.STOPPED)
            for i, n in enumerate(lengths)
        ),
    )


def scorables(experience: Experience, step: int) -> list[Scorable]:
    """The label is right where the response's length is odd."""
    lengths = experience.response_mask.split(experience.lengths.tolist())
    return [Scorable("", str(int(mask.sum()) % 2), "1", step=step) for mask in lengths]


@pytest.fixture
def scoring(tmp_path: Path) -> Any:
    with Scorer.of(schema.Reward(function="exact_match")) as scorer:
        yield GroupScoring(scorer, scorables, load_group_filter(DIFFER), SampleLog(str(tmp_path), "dropped.jsonl"))


def test_rewards_travel_with_the_samples_that_count_and_nobody_scores_them_again(scoring, tmp_path):
    mixed, dull, other = group_at(4, 1, 2), group_at(5, 2, 2), group_at(9, 4, 3)
    verdicts = {v.position: v for v in scoring.verdicts({group.position: group for group in (mixed, dull, other)}, 6)}
    assert {position: verdict.dropped_for for position, verdict in verdicts.items()} == {
        4: None,
        5: "zero_std_0.0",
        9: None,
    }
    scoring.drop(dull, 6, "zero_std_0.0")
    scoring.spare(mixed, 6, "any")
    (line,) = (tmp_path / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 6, "reason": "zero_std_0.0", "sample_ids": [50, 51]}
    experience = pack_groups([other, mixed], [4, 9])
    given = scoring.hand_over(6, 0, experience, [(other, verdicts[9].record), (mixed, verdicts[4].record)])
    assert given.rewards.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert given.reward_parts.tolist() == [[0.0], [1.0], [1.0], [0.0]]
    assert given.sample_ids.tolist() == [90, 91, 40, 41]
    statistics = RewardStatistics()
    handed_over = scoring.handed_over.pop((6, 0))
    for of_group, its_scores in handed_over.groups:
        statistics.add(of_group, its_scores)
    statistics.add_dropped(handed_over.dropped, handed_over.num_spared)
    metrics = RewardStatistics.metrics([statistics.record()])
    assert metrics["reward_mean"] == 0.5 and metrics["response_length_mean"] == 2.5
    assert metrics["dynamic_filter/kept_at_limit"] == 1
    assert metrics["dynamic_filter/dropped"] == metrics["dynamic_filter/drop_zero_std_0.0"] == 1
    (dropped,) = handed_over.dropped_groups
    assert dropped.sample_ids.tolist() == [50, 51] and dropped.rewards.tolist() == [0.0, 0.0]


def test_an_engine_that_drew_none_of_a_chunk_has_none_to_reward(scoring):
    none = scoring.hand_over(0, 1, pack_groups([], [1, 2]), [])
    assert none.num_samples == 0 and len(none.rewards) == len(none.turn_rewards) == 0
    assert none.reward_parts.shape == (0, 1), "as many functions as others have"


def test_scores_are_done_when_every_worker_has_answered():
    first, second = futures = (Future[list[Any]](), Future[list[Any]]())
    pending = PendingScores([], [futures, []])
    first.set_result([])
    assert not pending.is_done
    second.set_exception(ConfigError("no worker could start"))
    assert pending.is_done, "so that who waits learns of it"
    with Scorer.of(schema.Reward(function="exact_match")) as scorer:
        assert scorer.begin([Scorable("p", "r", "l")]).is_done, "of a function that needs no worker"


class Slow:
    """A scorer whose functions answer when they are told to."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def begin(self, samples: list[Scorable]) -> Any:
        self.samples = samples
        return self

    @property
    def is_done(self) -> bool:
        return self.answered.is_set()

    def wait(self, pending: Any) -> Scores:
        assert self.is_done, "nothing may wait for rewards while the engine could decode"
        return scores(0.0, 1.0)


def test_the_engine_goes_on_until_rewards_are_known():
    slow = Slow()
    scoring = GroupScoring(slow, scorables, load_group_filter(DIFFER), None)  # type: ignore[arg-type]
    groups = {3: group_at(3, 1, 1)}
    assert scoring.verdicts(groups, 0) == scoring.verdicts(groups, 0) == []
    slow.answered.set()
    assert [verdict.position for verdict in scoring.verdicts(groups, 0)] == [3]
