"""GDPO: several reward functions, each compared within the prompt by itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups

MIN_FUNCTIONS = 2


class Gdpo(GroupRelative):
    """Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
    Optimization":

        A_i = sum over f of w_f (r_(f, i) - mean(r_f)) / std(r_f)        over the responses of a prompt
        A_i becomes (A_i - mean(A)) / std(A)        over all response tokens of the step

    with the weights w_f of reward.functions. A response that a function is not for (None) is no member of that
    function's groups. advantages.normalize_std false leaves out the first division.
    """

    name = "gdpo"
    uses = frozenset({"normalize_std", "whiten"})
    compares = "reward_parts"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        functions = self.config.reward.functions
        if len(functions) < MIN_FUNCTIONS:
            yield (
                f"reward.functions: got {len(functions)}; expected at least {MIN_FUNCTIONS}: algorithm gdpo "
                "normalises each apart, and for one alone there is grpo"
            )
        reason = "algorithm gdpo looks at what each of reward.functions gave, of which that is none"
        if self.penalizes_reward():
            yield f"loss.kl.where: got reward; expected loss: {reason}"
        if self.config.advantages.overlong_penalty is not None:
            yield f"advantages.overlong_penalty: got one; expected null: {reason}"

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        """`rewards` are [members, functions], NaN where a function is not for the sample."""
        advantages = rewards.new_zeros(len(rewards))
        for part, of_function in zip(rewards.unbind(1), self.config.reward.functions, strict=True):
            known = ~part.isnan()
            own, among = part[known], groups.select(known)
            normalised = among.standardized(own) if self.config.advantages.normalize_std else among.centred(own)
            advantages[known] += of_function.weight * normalised
        return advantages
