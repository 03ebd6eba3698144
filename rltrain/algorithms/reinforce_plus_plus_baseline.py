"""REINFORCE++ with a baseline: compared within the prompt, normalised over the step."""

from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups


class ReinforcePlusPlusBaseline(GroupRelative):
    """Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    the variant for several responses to a prompt:

        A_i = r_i - mean(r)        over the responses of a prompt
        A_i becomes (A_i - mean(A)) / std(A)        over all response tokens of the step

    The paper has the distance from the reference in the loss: loss.kl.where loss, estimator k2.
    """

    name = "reinforce_plus_plus_baseline"
    uses = frozenset({"whiten"})

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.centred(rewards)
