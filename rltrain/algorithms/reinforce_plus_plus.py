"""REINFORCE++: every token is as good as what comes of it compares with all tokens of the step."""

from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience


class ReinforcePlusPlus(Algorithm):
    """Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization":

        A_t = sum over i >= t of gamma^(i - t) (r at the last token - beta KL_i)
        A_t becomes (A_t - mean(A)) / std(A)        over all response tokens of the step

    The distance from the reference, where loss.kl is in the reward, is taken off token by token. The paper has no
    discount (gamma 1) and estimates it by k1.
    """

    name = "reinforce_plus_plus"
    per_token = True
    uses = frozenset({"gamma", "whiten"})

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.gae import with_returns_to_go

        return with_returns_to_go(experience, token_rewards, gamma=self.config.advantages.gamma)
