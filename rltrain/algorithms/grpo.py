"""GRPO: a response is as good as its reward compares with those of the other responses to its prompt."""

from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups


class Grpo(GroupRelative):
    """Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 4.1.2:

        A_i = (r_i - mean(r)) / std(r)        over the responses of a prompt

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective") leaves it undivided:
    advantages.normalize_std false, with loss.normalization dr_grpo.
    """

    name = "grpo"
    uses = frozenset({"normalize_std"})

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.standardized(rewards) if self.config.advantages.normalize_std else groups.centred(rewards)
