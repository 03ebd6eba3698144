"""Reward models: the actor, with a head that gives scores, comes to score what was preferred above what was not."""

from typing import TYPE_CHECKING

from rltrain.algorithms.from_pairs import FromPairs

if TYPE_CHECKING:
    from rltrain.algorithms.losses import LossFunction


class RewardModel(FromPairs):
    name = "reward_model"
    has_no_use_for = frozenset({"loss", "beta", "label_smoothing", "sft_coef"})

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.ranking import ranking_loss

        return ranking_loss(self.config.preference)
