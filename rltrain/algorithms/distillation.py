"""On-policy distillation: the actor learns to be like a teacher on what it draws itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
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

    def with_advantages(self, experience: "Experience") -> "Experience":
        import torch

        return experience.with_fields(advantages=torch.zeros(experience.num_tokens))
