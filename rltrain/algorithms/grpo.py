"""GRPO: a response is as good as its reward compares with those of the other responses to its prompt."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from rltrain.data.experience import Experience

MIN_SAMPLES_PER_GROUP = 2


class Grpo(Algorithm):
    name = "grpo"

    def problems(self) -> Iterator[str]:
        samples = self.config.batch.samples_per_prompt
        if samples < MIN_SAMPLES_PER_GROUP:
            yield (
                f"batch.samples_per_prompt: got {samples}; expected at least {MIN_SAMPLES_PER_GROUP}: "
                "algorithm grpo compares the samples of a prompt, and the advantage of a single one is 0"
            )
        yield from super().problems()

    def with_advantages(self, experience: "Experience") -> "Experience":
        from rltrain.algorithms.advantages import with_advantages
        from rltrain.algorithms.kl import apply_kl_to_rewards

        if self.penalizes_reward():
            experience = apply_kl_to_rewards(experience, self.config.loss.kl)
        return with_advantages(experience, normalize_std=self.config.advantages.normalize_std)
