"""RLOO: a response is as good as its reward exceeds the mean of the others to its prompt."""

from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups


class Rloo(GroupRelative):
    """Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
    in LLMs" (Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"):

        A_i = r_i - 1/(n - 1) sum over j != i of r_j        over the n responses of a prompt

    An episode that is alone has nothing to be compared with: its mean is the baseline.
    """

    name = "rloo"

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return (rewards - groups.others_means(rewards)).masked_fill(groups.are_equal(rewards), 0)
