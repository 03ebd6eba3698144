"""pass_at_k: a response is as good as it improves the best of k responses to its prompt."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups


class PassAtK(GroupRelative):
    """Walder and Karkhanis 2025, "Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems", the
    estimator with the leave-one-out baseline of k - 1 samples:

        A_i = mean over the sets I of k responses that hold i of (max of r over I - max of r over I without i)

    over the responses of a prompt; k / n times that is the paper's s_i, whose sum over i of s_i grad log p_i is an
    unbiased estimate of the gradient of E[max of k rewards]. With k = n it is Tang et al. 2025, "Optimizing Language
    Models for Inference Time Objectives using Reinforcement Learning": the best response's reward less the second
    best's. advantages.normalize_std divides by the standard deviation of the prompt's rewards.
    """

    name = "pass_at_k"
    uses = frozenset({"normalize_std", "k"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        k, samples = self.config.advantages.k, self.config.batch.samples_per_prompt
        if not 2 <= k <= max(samples, 2):
            yield (
                f"advantages.k: got {k} with batch.samples_per_prompt {samples}; expected 2 to {samples}: algorithm "
                "pass_at_k takes the best of k samples of a prompt, and the best of one is grpo's or rloo's"
            )

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        from rltrain.algorithms.best_of_k import gains_of_best

        gains = gains_of_best(rewards, groups, self.config.advantages.k)
        return groups.over_deviations(gains, rewards) if self.config.advantages.normalize_std else gains
