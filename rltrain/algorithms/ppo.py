"""PPO: every token is as good as what comes of it compares with what the critic expected there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience


class Ppo(Algorithm):
    """Schulman et al. 2017, "Proximal Policy Optimization Algorithms", with the advantages of Schulman et al. 2016,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation":

        A_t = sum over l of (gamma lambda)^l delta_(t + l),   delta_t = r_t + gamma V_(t + 1) - V_t

    whitened over the response tokens of a step.
    """

    name = "ppo"
    per_token = True
    uses = frozenset({"gamma", "gae_lambda", "whiten"})

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

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.gae import with_gae

        settings = self.config.advantages
        return with_gae(experience, token_rewards, gamma=settings.gamma, lam=settings.gae_lambda)
