"""Algorithms that give a response one advantage, by comparing it with the other responses to its prompt."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.groups import Groups
    from rltrain.data.experience import Experience

MIN_SAMPLES_PER_GROUP = 2


class GroupRelative(Algorithm):
    """The distance from the reference is taken off a response's reward as a whole."""

    compares: ClassVar[str] = "rewards"
    """The field of the experience that `of_groups` gets."""

    def problems(self) -> Iterator[str]:
        samples = self.config.batch.samples_per_prompt
        if samples < MIN_SAMPLES_PER_GROUP:
            yield (
                f"batch.samples_per_prompt: got {samples}; expected at least {MIN_SAMPLES_PER_GROUP}: algorithm "
                f"{self.name} compares the samples of a prompt, and the advantage of a single one is 0"
            )
        yield from super().problems()

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        """[members] fp64 advantages of the samples that are trained on, from their rewards."""
        raise NotImplementedError(f"algorithm {self.name} compares nothing")

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_sample_advantages

        return with_sample_advantages(experience, self.of_groups, of=self.compares, token_rewards=token_rewards)
