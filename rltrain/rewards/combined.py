"""Scores samples with all reward functions of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rltrain.config import schema
from rltrain.rewards.registry import RewardFunction, load_rewards
from rltrain.rewards.scorable import Scorable
from rltrain.rewards.scorer import Scorer, Scores


@dataclass(frozen=True)
class CombinedScores:
    """The reward of each sample: the weighted sum of what the functions gave."""

    rewards: list[float]
    by_function: Mapping[str, Scores]
    """By the functions' titles."""
    unscored: frozenset[int] = frozenset()
    """Samples that none of the functions is for, with reward 0."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns a function rewarded one by one; the other functions' rewards are the last turn's.
    Their sum is the sample's reward."""

    def by_sample(self) -> list[list[float]]:
        """Of each sample what each function gave, unweighted; NaN where the function is not for it."""
        columns = [
            [math.nan if index in of.skipped else reward for index, reward in enumerate(of.rewards)]
            for of in self.by_function.values()
        ]
        return [[*row] for row in zip(*columns, strict=True)]


class CombinedScorer:
    """Has the functions of the config's section score the same samples, beside each other. Close it at the end."""

    def __init__(self, settings: schema.Reward, on_scored: Callable[[], None] = lambda: None) -> None:
        self.functions: Sequence[RewardFunction] = load_rewards(settings)
        self._scorers = [Scorer.of(function, settings, on_scored) for function in self.functions]

    def score(self, samples: Sequence[Scorable]) -> CombinedScores:
        """Rewards in the order of `samples`. Raises ConfigError if a function's worker cannot start."""
        try:
            pending = [scorer.begin(samples) for scorer in self._scorers]
            return combined(self.functions, [scores() for scores in pending])
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


def combined(functions: Sequence[RewardFunction], scores: Sequence[Scores]) -> CombinedScores:
    """Of the scores of each function for the same samples."""
    weights = [function.weight for function in functions]
    rewards = [
        sum(weight * reward for weight, reward in zip(weights, of_sample, strict=True))
        for of_sample in zip(*(of_function.rewards for of_function in scores), strict=True)
    ]
    by_turns = sorted({index for of_function in scores for index in of_function.turn_rewards})
    return CombinedScores(
        rewards,
        {function.title: of_function for function, of_function in zip(functions, scores, strict=True)},
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
