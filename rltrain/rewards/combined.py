"""Scores samples with all reward functions of a run, and with what models have told of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rltrain.config import schema
from rltrain.errors import RewardError
from rltrain.rewards.registry import RewardFunction, load_rewards
from rltrain.rewards.reward_range import EXPECTED_REWARD, is_reward
from rltrain.rewards.rewarding_model import RewardingModel
from rltrain.rewards.scorable import Scorable
from rltrain.rewards.scorer import PendingScores, Scorer, Scores

Part = RewardFunction | RewardingModel


@dataclass(frozen=True)
class CombinedScores:
    """The reward of each sample: the weighted sum of what functions and models gave."""

    rewards: list[float]
    by_function: Mapping[str, Scores]
    """By the titles of functions and models."""
    unscored: frozenset[int] = frozenset()
    """Samples that none of the functions is for, with reward 0."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns a function rewarded one by one; the other functions' rewards are the last turn's.
    Their sum is the sample's reward."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rewards": self.rewards,
            "by_function": {title: scores.record() for title, scores in self.by_function.items()},
            "unscored": sorted(self.unscored),
            "turn_rewards": [*self.turn_rewards.items()],
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "CombinedScores":
        return cls(
            record["rewards"],
            {title: Scores.of_record(scores) for title, scores in record["by_function"].items()},
            frozenset(record["unscored"]),
            dict(record["turn_rewards"]),
        )

    def by_sample(self) -> list[list[float]]:
        """Of each sample what each function gave, unweighted; NaN where the function is not for it."""
        columns = [
            [math.nan if index in of.skipped else reward for index, reward in enumerate(of.rewards)]
            for of in self.by_function.values()
        ]
        return [[*row] for row in zip(*columns, strict=True)]


class CombinedScorer:
    """Has the functions of the config's section score the same samples, beside each other. Close it at the end.

    `models` have scored them already, and are parts of the reward behind the functions.
    """

    def __init__(
        self,
        settings: schema.Reward,
        on_scored: Callable[[], None] = lambda: None,
        section: str = "reward",
        models: Sequence[RewardingModel] = (),
    ) -> None:
        """`settings` stand in the config under `section`."""
        self.functions: Sequence[RewardFunction] = load_rewards(settings, section, is_part=bool(models))
        self.parts: Sequence[Part] = (*self.functions, *models)
        self._scorers = [Scorer.of(function, settings, on_scored) for function in self.functions]

    def score(self, samples: Sequence[Scorable], told: Sequence[Scores] = ()) -> CombinedScores:
        """Rewards in the order of `samples`, of which models have `told`. Raises ConfigError if a function's worker
        cannot start."""
        return self.wait(self.begin(samples), told)

    def begin(self, samples: Sequence[Scorable]) -> Sequence[PendingScores]:
        """Have all functions begin with `samples`, for what `score` gives."""
        with self._closing_at_failure():
            return [scorer.begin(samples) for scorer in self._scorers]

    def wait(self, pending: Sequence[PendingScores], told: Sequence[Scores] = ()) -> CombinedScores:
        """What came of `begin`."""
        with self._closing_at_failure():
            return combined(self.parts, [*(scores.wait() for scores in pending), *told])

    @contextmanager
    def _closing_at_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the functions' processes. Nothing can be scored afterwards."""
        for scorer in self._scorers:
            scorer.close()

    def __enter__(self) -> "CombinedScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def combined(parts: Sequence[Part], scores: Sequence[Scores]) -> CombinedScores:
    """Of the scores by each part for the same samples."""
    weights = [part.weight for part in parts]
    rewards = [
        sum(weight * reward for weight, reward in zip(weights, of_sample, strict=True))
        for of_sample in zip(*(of_function.rewards for of_function in scores), strict=True)
    ]
    beyond = next((reward for reward in rewards if not is_reward(reward)), None)
    if beyond is not None:
        raise RewardError(f"reward: the weighted sum of its parts is {beyond:g} for a response; {EXPECTED_REWARD}")
    by_turns = sorted({index for of_function in scores for index in of_function.turn_rewards})
    return CombinedScores(
        rewards,
        {part.title: of_part for part, of_part in zip(parts, scores, strict=True)},
        frozenset.intersection(*(of_function.skipped for of_function in scores)),
        {index: _turn_rewards(index, weights, scores) for index in by_turns},
    )


def _turn_rewards(sample: int, weights: Sequence[float], scores: Sequence[Scores]) -> list[float]:
    num_turns = next(len(of.turn_rewards[sample]) for of in scores if sample in of.turn_rewards)
    turns = [0.0] * num_turns
    for weight, of_function in zip(weights, scores, strict=True):
        whole = [0.0] * (num_turns - 1) + [of_function.rewards[sample]]
        for turn, reward in enumerate(of_function.turn_rewards.get(sample, whole)):
            turns[turn] += weight * reward
    return turns
