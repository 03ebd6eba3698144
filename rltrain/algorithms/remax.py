"""ReMax: a response is as good as its reward exceeds that of the greedy response to its prompt."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience


class ReMax(Algorithm):
    """Li et al. 2024, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models":

        A_i = r(x, y_i) - r(x, greedy y)

    The greedy response to each prompt is drawn and scored beside the sampled ones, and not trained on. A distance from
    the reference that is taken off the reward is that of the sampled response alone.
    """

    name = "remax"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config.env.agent is not None:
            yield (
                "env.agent: got one with algorithm remax; expected none: each of its requests says itself how its "
                "tokens are drawn, and remax needs an episode that is drawn greedily"
            )

    def greedy_samples_per_group(self) -> int:
        return 1

    def compared_with_greedy(self, experience: "Experience") -> "Experience":
        from rltrain.algorithms.greedy_baseline import less_greedy_rewards

        return less_greedy_rewards(experience, self.is_greedy(experience))

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_sample_advantages

        return with_sample_advantages(experience, lambda rewards, _: rewards, token_rewards=token_rewards)
