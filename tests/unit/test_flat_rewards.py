"""Steps from which nothing is learned are told of."""

import logging

import pytest
import torch

from rltrain.rewards.scorer import Scores
from rltrain.roles.reward import FlatRewards
from rltrain.roles.reward_statistics import RewardStatistics
from tests.unit.packed_experience import packed_experience


def share_of(groups: dict[int, list[float]]) -> float | None:
    rewards = [reward for of_group in groups.values() for reward in of_group]
    ids = [number for number, of_group in groups.items() for _ in of_group]
    experience = packed_experience([(3, 2)] * len(rewards)).with_fields(
        rewards=torch.tensor(rewards),
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
        group_ids=torch.tensor(ids),
    )
    statistics = RewardStatistics(counts_flat_groups=True)
    statistics.add(experience, Scores(rewards, by_function={"": Scores(rewards)}))
    return RewardStatistics.metrics([statistics.record()]).get("flat_groups")


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ({0: [0.0, 0.0], 5: [1.0, 1.0, 1.0]}, 1.0),
        ({0: [0.0, 0.0], 5: [1.0, 0.5, 1.0]}, 0.5),
        ({0: [-1.0, 1.0], 5: [0.0, -2.0]}, 0.0),
        ({0: [1.0], 5: [0.0, 0.0]}, 1.0),
        ({0: [1.0], 5: [0.0]}, None),
    ],
)
def test_groups_without_a_spread_are_counted(groups: dict[int, list[float]], share: float | None) -> None:
    """A single sample has nothing to be compared with."""
    assert share_of(groups) == share


def test_the_first_flat_step_is_logged_and_a_row_of_them_warns(caplog: pytest.LogCaptureFixture) -> None:
    watch, shares = FlatRewards(3), [0.5, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0, 0.2, 1.0, 1.0, 1.0]
    with caplog.at_level(logging.INFO):
        for step, share in enumerate(shares):
            watch.look(step, {"flat_groups": share, "reward_mean": 0.0})
    said = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    row = "in 3 steps in a row, since step {}, 100 % of the groups have no spread of rewards"
    assert said == [("INFO", "step 1"), ("WARNING", row.format(3)), ("WARNING", row.format(8))]


def test_the_warning_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    watch = FlatRewards(None)
    for step in range(20):
        watch.look(step, {"flat_groups": 1.0, "reward_mean": 0.0})
    assert not caplog.records
