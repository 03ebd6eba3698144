"""A scorer with one reward function. It returns the scores of this function."""

from collections.abc import Callable, Sequence
from typing import Any

from rltrain.config import schema
from rltrain.rewards.functions import RewardFunction
from rltrain.rewards.scorer import PendingScores, Scorer, Scores


class OneFunction(Scorer):
    def __init__(
        self, function: RewardFunction, *, on_scored: Callable[[], None] = lambda: None, **settings: Any
    ) -> None:
        super().__init__([function], schema.Reward(**settings), on_scored)

    def wait(self, pending: PendingScores, told: Sequence[Scores] = ()) -> Scores:
        return super().wait(pending, told).by_function[self.functions[0].title]
