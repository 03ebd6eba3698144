"""MaxRL: the gradient of a prompt's log-likelihood of success instead of its success rate."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups


class MaxRl(GroupRelative):
    """Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", with the mean as control variate:

        A_i = (r_i - mean(r)) / mean(r)        over the responses of a prompt, 0 where mean(r) is 0

    Over n responses with k successes that is 1/k times the sum of the successes' gradients less 1/n times that of all:
    in expectation the gradient of the log of the success rate p, as its series -sum over m < n of (1 - p)^m / m.
    Rewards are chances of success, from 0 to 1.
    """

    name = "maxrl"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        reason = "algorithm maxrl divides by the mean reward of a prompt, which is to be its rate of success"
        if self.penalizes_reward():
            yield f"loss.kl.where: got reward; expected loss: {reason}"
        if self.config.advantages.overlong_penalty is not None:
            yield f"advantages.overlong_penalty: got one; expected null: {reason}"

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        means = groups.means(rewards)
        fails = means <= 0
        return groups.centred(rewards).masked_fill(fails, 0) / means.masked_fill(fails, 1)
