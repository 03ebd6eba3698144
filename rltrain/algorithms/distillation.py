"""On-policy distillation: the actor learns to be like a teacher on what it draws itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience


class Distillation(Algorithm):
    """Agarwal et al. 2024, "On-Policy Distillation of Language Models"; Gu et al. 2024, "MiniLLM".

    Rewards are logged and teach nothing: all that is learned from is the distance from the teacher, which any other
    algorithm may have beside its own advantages.
    """

    name = "distillation"

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "teacher": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.penalizes_reward():
            yield "loss.kl.where: got reward; expected loss: algorithm distillation does not learn from rewards"
        if self.config.advantages.overlong_penalty is not None:
            yield "advantages.overlong_penalty: got one; expected null: algorithm distillation learns from no rewards"

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        import torch

        return experience.with_fields(advantages=torch.zeros(experience.num_tokens))
