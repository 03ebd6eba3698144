"""PPO: every token is as good as what comes of it compares with what the critic expected there."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience


class Ppo(Algorithm):
    name = "ppo"

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "critic": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.first_actor_step() >= self.config.steps:
            yield (
                f"critic.critic_warmup_steps: got {self.first_actor_step()} of {self.config.steps} steps (config key "
                "steps); expected fewer, so that the actor learns too"
            )

    def first_actor_step(self) -> int:
        return self.config.critic.critic_warmup_steps

    def needs_whole_step(self) -> bool:
        return self.config.advantages.whiten

    def with_advantages(self, experience: "Experience") -> "Experience":
        from rltrain.algorithms.gae import with_gae
        from rltrain.algorithms.kl import kl_penalty

        settings = self.config.advantages
        token_rewards = kl_penalty(experience, self.config.loss.kl) if self.penalizes_reward() else None
        return with_gae(experience, token_rewards, gamma=settings.gamma, lam=settings.gae_lambda)

    def over_whole_step(self, experience: "Experience", total: Callable[["Tensor"], "Tensor"]) -> "Experience":
        from rltrain.algorithms.gae import moments, whiten

        if not self.needs_whole_step():
            return experience
        sums = total(moments(experience))
        return experience.with_fields(advantages=whiten(experience.advantages, experience.response_mask, sums))
