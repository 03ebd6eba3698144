"""What an algorithm says of a run: its roles, its demands on the config, what the actor learns from, by which loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rltrain.config.schema import Advantages, Config
from rltrain.tasks.roles import optional_roles

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.losses import LossFunction
    from rltrain.data.demonstrations import Demonstrations, Preferences
    from rltrain.data.experience import Experience
    from rltrain.data.row_index import IndexFolder
    from rltrain.data.tokenizer import ModelLimits


def _of_one(values: "Tensor") -> "Tensor":
    return values


@dataclass(frozen=True)
class Replicas:
    """What all of the actor's replicas have together; as it is by default, of one that has no others. Collective over:
    the actor's ranks."""

    total: Callable[["Tensor"], "Tensor"] = _of_one
    """Adds up a tensor."""
    gathered: Callable[["Tensor"], "Tensor"] = _of_one
    """Puts theirs [n] one behind the other, on each in the same order."""


USED_BY_ALL = frozenset({"overlong_penalty", "mask_truncated"})


# Checks, plans and --dry-run ask it too, and start in a moment because they do not load torch: what needs torch is
# imported inside the methods that only the actor calls.
@dataclass(frozen=True)
class Algorithm:
    """The algorithm of one config. Unless a method says otherwise it learns from responses that the rollout draws."""

    name: ClassVar[str]
    generates: ClassVar[bool] = True
    """Whether training is on responses of the rollout, which otherwise is there for evaluations alone."""
    reads_responses: ClassVar[bool] = False
    """Whether the responses that are trained on stand in the rows."""
    from_pairs: ClassVar[bool] = False
    """Whether training and evaluations are on pairs of samples that are compared, which therefore stay together."""
    trains: ClassVar[bool] = True
    """Whether anything is trained; otherwise the run is one evaluation of model.path."""
    per_token: ClassVar[bool] = False
    """Whether the tokens of a response have advantages of their own."""
    needs_actor_squares: ClassVar[bool] = False
    """Whether the actor's evaluation of the samples before its first update is to give actor_squares as well."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """Keys of section advantages that change what it does, beside those of every algorithm (USED_BY_ALL)."""

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
        yield from self._kl_problems()
        overlong, longest = self.config.advantages.overlong_penalty, self.config.rollout.sampling.max_response_tokens
        if overlong is not None and overlong.buffer_tokens > longest:
            yield (
                f"advantages.overlong_penalty.buffer_tokens: got {overlong.buffer_tokens}; expected at most "
                f"rollout.sampling.max_response_tokens {longest}, before which they lie"
            )
        given, defaults = self.config.advantages, Advantages()
        for key in sorted(given.model_fields_set - self.uses - USED_BY_ALL):
            value, default = getattr(given, key), getattr(defaults, key)
            if value != default:
                yield (
                    f"advantages.{key}: got {value}; expected {default}, or nothing: algorithm {self.name} does not "
                    "look at it"
                )

    def _kl_problems(self) -> Iterator[str]:
        kl = self.config.loss.kl
        if kl.adaptive is not None and not self.penalizes_reward():
            yield (
                f"loss.kl.adaptive: got one with loss.kl.coef {kl.coef} and loss.kl.where {kl.where}; expected a "
                "coefficient above 0 to start from, and where: reward: it is the reward's penalty that adapts"
            )

    def samples_per_group(self) -> int:
        """Samples of one prompt that are trained on."""
        return self.config.batch.samples_per_prompt

    def greedy_samples_per_group(self) -> int:
        """Samples of one prompt that are drawn beside them, each token the most likely one, to be compared with."""
        return 0

    def is_greedy(self, experience: "Experience") -> "Tensor":
        """[samples] bool: which are of those. They come last in their group, by their ids."""
        from rltrain.data.experience import SIBLINGS_APART

        sampled, greedy = self.samples_per_group(), self.greedy_samples_per_group()
        return experience.sample_ids % SIBLINGS_APART % (sampled + greedy) >= sampled

    def first_actor_step(self) -> int:
        """The first step in which the actor learns."""
        return 0

    def needs_actor_logprobs(self) -> bool:
        """Whether the actor evaluates the samples before its first update."""
        return self.config.loss.old_logprobs == "actor"

    def needs_whole_step(self) -> bool:
        """Whether `over_whole_step` changes advantages, so that no gradient can be made before the last chunk."""
        return "whiten" in self.uses and self.config.advantages.whiten

    def temperature(self) -> float:
        """That of the distribution whose log-probs the actor takes."""
        return self.config.rollout.sampling.temperature

    def longest_response(self) -> int | None:
        """Returns the most tokens of a response that is trained on. None: the model's positions alone limit it."""
        return self.config.rollout.sampling.max_response_tokens

    def training_data(
        self, indexes: "IndexFolder | None", model: "ModelLimits"
    ) -> "Demonstrations | Preferences | None":
        """What training is on where nothing is generated; `indexes` and `model` as in load_prompts."""
        return None

    def compared_with_greedy(self, experience: "Experience") -> "Experience":
        """Scored `experience` without its greedy samples, whose rewards have been used. Groups are whole."""
        return experience

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """Scored `experience` with advantages, and with returns where a critic is to learn from them.

        `token_rewards` [tokens] come beside the samples' rewards, such as a penalty for the distance from the
        reference. Groups are whole but for greedy samples.
        """
        raise NotImplementedError(f"algorithm {self.name} has no advantages")

    def over_whole_step(self, experience: "Experience", replicas: Replicas) -> "Experience":
        """A step's samples on this replica as they are trained on.

        Collective over: the actor's ranks.
        """
        if not self.needs_whole_step():
            return experience
        from rltrain.algorithms.advantages import moments, whiten

        sums = replicas.total(moments(experience))
        return experience.with_fields(advantages=whiten(experience.advantages, experience.response_mask, sums))

    def loss_function(self) -> "LossFunction":
        """The actor's."""
        from rltrain.algorithms.policy_loss import policy_loss

        config = self.config
        return policy_loss(config.loss, config.rollout.sampling.max_response_tokens, config.teacher)

    def penalizes_reward(self) -> bool:
        """Whether the distance from the reference is taken off the rewards."""
        kl = self.config.loss.kl
        return bool(kl.coef) and kl.where == "reward"
