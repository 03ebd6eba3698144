"""What an algorithm says of a run: its roles, its demands on the config, what the actor learns from, by which loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rltrain.config.schema import Config
from rltrain.tasks.roles import optional_roles

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.losses import LossFunction
    from rltrain.data.demonstrations import Demonstrations
    from rltrain.data.experience import Experience


# Checks, plans and --dry-run ask it too, and start in a moment because they do not load torch: what needs torch is
# imported inside the methods that only the actor calls.
@dataclass(frozen=True)
class Algorithm:
    """The algorithm of one config. Unless a method says otherwise it learns from responses that the rollout draws."""

    name: ClassVar[str]
    generates: ClassVar[bool] = True
    """Whether training is on responses of the rollout, which otherwise is there for evaluations alone."""
    trains: ClassVar[bool] = True
    """Whether anything is trained; otherwise the run is one evaluation of model.path."""

    config: Config

    def needs(self) -> dict[str, str]:
        """The roles without which the run cannot be made, each with what needs it."""
        needed = dict.fromkeys(("actor", "rollout", "reward"), f"algorithm {self.name}")
        coef = self.config.loss.kl.coef
        return {**needed, "reference": f"loss.kl.coef {coef}"} if coef else needed

    def usable_roles(self) -> frozenset[str]:
        """Roles that have a task in the run. A reference that no penalty needs still gives the distance from it."""
        unused = set() if self.needs_actor_logprobs() else {"inference"}
        return frozenset({*self.needs(), *optional_roles()} - unused)

    def problems(self) -> Iterator[str]:
        """What the config asks for and this algorithm cannot do, in sentences for the user."""
        if self.config.rollout.sampling.temperature == 0:
            yield (
                f"rollout.sampling.temperature: got 0; expected above 0: algorithm {self.name} learns from "
                "differing samples, and greedy ones are equal"
            )

    def samples_per_group(self) -> int:
        """Samples that the actor gets of one prompt."""
        return self.config.batch.samples_per_prompt

    def first_actor_step(self) -> int:
        """The first step in which the actor learns."""
        return 0

    def needs_actor_logprobs(self) -> bool:
        """Whether the actor evaluates the samples before its first update."""
        return self.config.loss.old_logprobs == "actor"

    def needs_whole_step(self) -> bool:
        """Whether `over_whole_step` changes advantages, so that no gradient can be made before the last chunk."""
        return False

    def temperature(self) -> float:
        """That of the distribution whose log-probs the actor takes."""
        return self.config.rollout.sampling.temperature

    def demonstrations(self) -> "Demonstrations | None":
        """What training is on where nothing is generated."""
        return None

    def with_advantages(self, experience: "Experience") -> "Experience":
        """Scored `experience` with advantages, and with returns where a critic is to learn from them."""
        raise NotImplementedError(f"algorithm {self.name} has no advantages")

    def over_whole_step(self, experience: "Experience", total: Callable[["Tensor"], "Tensor"]) -> "Experience":
        """A step's samples on this replica as they are trained on; `total` adds up a tensor over all replicas.

        Collective over: the actor's ranks.
        """
        return experience

    def loss_function(self) -> "LossFunction":
        """The actor's."""
        from rltrain.algorithms.policy import policy_loss

        config = self.config
        return policy_loss(config.loss, config.rollout.sampling.max_response_tokens, config.teacher)

    def penalizes_reward(self) -> bool:
        """Whether the distance from the reference is taken off the rewards."""
        kl = self.config.loss.kl
        return bool(kl.coef) and kl.where == "reward"
