"""GPG: compared within the prompt, and scaled by how few samples of the step teach anything."""

from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Replicas
from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups
    from rltrain.data.experience import Experience


class Gpg(GroupRelative):
    """Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning":

        A_i = alpha (r_i - mean(r))        over the responses of a prompt
        alpha = B / (B - M)        of the B samples of the step, M of which are of prompts with equal rewards

    With advantages.scale_by rewarded, verl's, B - M is the number of samples whose reward is not 0. The paper's loss
    has no ratio: loss.policy reinforce.
    """

    name = "gpg"
    uses = frozenset({"scale_by"})

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.centred(rewards)

    def needs_whole_step(self) -> bool:
        return True

    def over_whole_step(self, experience: "Experience", replicas: Replicas) -> "Experience":
        import torch

        from rltrain.algorithms.losses import of_response, response_lengths, sample_sums

        members, groups = response_lengths(experience) > 0, experience.group_ids
        if self.config.advantages.scale_by == "rewarded":
            counted = members & (experience.rewards != 0)
        else:
            differing = sample_sums(experience, of_response(experience, "advantages").abs()) != 0
            counted = members & torch.isin(groups, groups[differing])
        num_samples, num_counted = replicas.total(torch.stack([members.sum(), counted.sum()]).double()).tolist()
        return experience.with_fields(advantages=experience.advantages * (num_samples / max(num_counted, 1)))
