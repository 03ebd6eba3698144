"""The base class of algorithms: required roles, config problems, training data, advantages and the loss."""

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


def _unchanged(values: "Tensor") -> "Tensor":
    return values


@dataclass(frozen=True)
class Replicas:
    """Reductions over the actor's data-parallel replicas. The defaults suit a single replica.

    Collective over: the actor's ranks.
    """

    total: Callable[["Tensor"], "Tensor"] = _unchanged
    """Sums a tensor over all replicas."""
    gathered: Callable[["Tensor"], "Tensor"] = _unchanged
    """Concatenates every replica's tensor along the first dimension, in the same order on all of them."""


USED_BY_ALL = frozenset({"overlong_penalty", "mask_truncated"})


# Checks, plans and --dry-run use this class too. They start fast because they load no torch, so the methods of the
# actor import torch themselves.
@dataclass(frozen=True)
class Algorithm:
    """The algorithm of one config. By default it trains on responses of the rollout."""

    name: ClassVar[str]
    generates: ClassVar[bool] = True
    """Whether training uses responses of the rollout. Otherwise the rollout serves evaluations alone."""
    reads_responses: ClassVar[bool] = False
    """Whether the responses for training come from the rows."""
    from_pairs: ClassVar[bool] = False
    """Whether training and evaluation use pairs of samples. The samples of a pair stay together."""
    trains: ClassVar[bool] = True
    """Whether the run trains. Otherwise it is a single evaluation of model.path."""
    per_token: ClassVar[bool] = False
    """Whether every token of a response has its own advantage."""
    whitens: ClassVar[bool] = False
    """Whether advantages are whitened over a step if advantages.whiten is null."""
    needs_actor_squares: ClassVar[bool] = False
    """Whether the actor's evaluation before its first update must also compute the field actor_squares."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """Keys of config section advantages that this algorithm uses, in addition to USED_BY_ALL."""

    config: Config

    def needs(self) -> dict[str, str]:
        """Returns the required roles, each with the part of the config that requires it."""
        needed = dict.fromkeys(("actor", "rollout", "reward"), f"algorithm {self.name}")
        coef = self.config.loss.kl.coef
        return {**needed, "reference": f"loss.kl.coef {coef}"} if coef else needed

    def usable_roles(self) -> frozenset[str]:
        """Returns the roles that have a task in the run. A reference without a KL penalty only reports the distance."""
        unused = set() if self.needs_actor_logprobs() else {"inference"}
        return frozenset({*self.needs(), *optional_roles()} - unused)

    def problems(self) -> Iterator[str]:
        """Yields a sentence for the user about each setting that this algorithm cannot handle."""
        if self.config.rollout.sampling.temperature == 0:
            yield (
                f"rollout.sampling.temperature: got 0; expected above 0: algorithm {self.name} needs different samples "
                "of a prompt, and greedy samples are equal"
            )
        yield from self._kl_problems()
        overlong, longest = self.config.advantages.overlong_penalty, self.config.rollout.sampling.max_response_tokens
        if overlong is not None and overlong.buffer_tokens > longest:
            yield (
                f"advantages.overlong_penalty.buffer_tokens: got {overlong.buffer_tokens}; expected at most "
                f"rollout.sampling.max_response_tokens {longest}, since the buffer is the end of the longest response"
            )
        given, defaults = self.config.advantages, Advantages()
        for key in sorted(given.model_fields_set - self.uses - USED_BY_ALL):
            value, default = getattr(given, key), getattr(defaults, key)
            shown = "null" if default is None else default
            if value != default:
                yield (
                    f"advantages.{key}: got {value}; expected {shown}, or no value: algorithm {self.name} does not "
                    "use it"
                )

    def _kl_problems(self) -> Iterator[str]:
        kl = self.config.loss.kl
        if kl.adaptive is not None and not self.penalizes_reward():
            yield (
                f"loss.kl.adaptive: got one with loss.kl.coef {kl.coef} and loss.kl.where {kl.where}; expected an "
                "initial coefficient above 0 and where: reward, since only the penalty in the reward can adapt"
            )

    def samples_per_group(self) -> int:
        """Returns the number of training samples per prompt."""
        return self.config.batch.samples_per_prompt

    def greedy_samples_per_group(self) -> int:
        """Returns the number of greedy samples per prompt. They are generated as a baseline, beside the training
        samples."""
        return 0

    def is_greedy(self, experience: "Experience") -> "Tensor":
        """Returns which samples are greedy, bool [samples]. They have the last sample ids of their group."""
        from rltrain.data.experience import SIBLINGS_APART

        sampled, greedy = self.samples_per_group(), self.greedy_samples_per_group()
        return experience.sample_ids % SIBLINGS_APART % (sampled + greedy) >= sampled

    def first_actor_step(self) -> int:
        """Returns the first step with an update of the actor."""
        return 0

    def needs_actor_logprobs(self) -> bool:
        """Returns whether the actor computes log-probs of the samples before its first update."""
        return self.config.loss.old_logprobs == "actor"

    def needs_whole_step(self) -> bool:
        """Returns whether `over_whole_step` changes advantages. If so, gradients wait for the step's last chunk."""
        given = self.config.advantages.whiten
        return "whiten" in self.uses and (self.whitens if given is None else given)

    def temperature(self) -> float:
        """Returns the sampling temperature for the actor's log-probs."""
        return self.config.rollout.sampling.temperature

    def longest_response(self) -> int | None:
        """Returns the largest number of response tokens in a training sample. None: only the model's positions limit
        it."""
        return self.config.rollout.sampling.max_response_tokens

    def training_data(
        self, indexes: "IndexFolder | None", model: "ModelLimits"
    ) -> "Demonstrations | Preferences | None":
        """Returns the rows for training, or None if the rollout generates the samples.

        `indexes` and `model` are those of `load_prompts`.
        """
        return None

    def compared_with_greedy(self, experience: "Experience") -> "Experience":
        """Returns scored `experience` without its greedy samples, after their rewards served as a baseline.

        Groups must be whole. The base class has no greedy samples and returns `experience` unchanged.
        """
        return experience

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """Returns scored `experience` with advantages, and with returns if a critic learns from them.

        `token_rewards` [tokens] are added to the rewards of the samples, for example a KL penalty. Groups must be
        whole, apart from greedy samples.
        """
        raise NotImplementedError(f"algorithm {self.name} has no advantages")

    def over_whole_step(self, experience: "Experience", replicas: Replicas) -> "Experience":
        """Returns this replica's samples of a whole step, with their final advantages.

        Collective over: the actor's ranks.
        """
        if not self.needs_whole_step():
            return experience
        from rltrain.algorithms.advantages import moments, whiten

        sums = replicas.total(moments(experience))
        return experience.with_fields(advantages=whiten(experience.advantages, experience.response_mask, sums))

    def loss_function(self) -> "LossFunction":
        """Returns the loss function of the actor."""
        from rltrain.algorithms.policy_loss import policy_loss

        config = self.config
        return policy_loss(config.loss, config.rollout.sampling.max_response_tokens, config.teacher)

    def penalizes_reward(self) -> bool:
        """Returns whether the KL penalty is subtracted from the rewards."""
        kl = self.config.loss.kl
        return bool(kl.coef) and kl.where == "reward"
