"""Algorithms for demonstrations, preference pairs and teachers, and the algorithm for evaluation alone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rltrain.algorithms.algorithm import Algorithm
from rltrain.tasks.roles import ENV, rewarding_roles

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.losses import LossFunction
    from rltrain.data.demonstrations import Demonstrations, Preferences
    from rltrain.data.experience import Experience
    from rltrain.data.row_index import IndexFolder
    from rltrain.data.tokenizer import ModelLimits


class Distillation(Algorithm):
    """On-policy distillation: the actor imitates a teacher on its own samples.

    It trains on the distance from the teacher alone. Rewards are logged but not learned from. Every other algorithm can
    add the same distance to its own advantages. Agarwal et al. 2024, "On-Policy Distillation of Language Models"; Gu et
    al. 2024, "MiniLLM".
    """

    name = "distillation"

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "teacher": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.penalizes_reward():
            yield "loss.kl.where: got reward; expected loss: algorithm distillation uses no rewards"
        if self.config.advantages.overlong_penalty is not None:
            yield "advantages.overlong_penalty: got one; expected null: algorithm distillation uses no rewards"

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        import torch

        return experience.with_fields(advantages=torch.zeros(experience.num_tokens))


class Evaluate(Algorithm):
    """Evaluation alone: the rollout answers the evaluation sets with the weights of model.path, and they are scored."""

    name = "evaluate"
    generates = False
    trains = False

    def needs(self) -> dict[str, str]:
        return dict.fromkeys(("rollout", "reward"), "algorithm evaluate")

    def usable_roles(self) -> frozenset[str]:
        return frozenset({*self.needs(), ENV.name, *rewarding_roles()})

    def problems(self) -> Iterator[str]:
        if not self.config.evaluations:
            yield "evaluation.sets: got none, and no data.eval; expected one of them: algorithm evaluate only evaluates"

    def samples_per_group(self) -> int:
        return 1

    def needs_actor_logprobs(self) -> bool:
        return False


class Supervised(Algorithm):
    """The base class of algorithms that train on given responses. Nothing is generated for training."""

    generates = False
    reads_responses = True

    def samples_per_group(self) -> int:
        return 1

    def needs_actor_logprobs(self) -> bool:
        return False

    def temperature(self) -> float:
        return 1.0

    def longest_response(self) -> int | None:
        return self.config.data.max_response_tokens


class FromPairs(Supervised):
    """The base class of algorithms that train on pairs of a chosen and a rejected response.

    Nothing is generated, even for evaluations: data.eval also contains pairs.
    """

    from_pairs = True

    has_no_use_for: ClassVar[frozenset[str]] = frozenset()
    """Keys of config section preference that this algorithm does not use."""

    def needs(self) -> dict[str, str]:
        return {"actor": f"algorithm {self.name}"}

    def usable_roles(self) -> frozenset[str]:
        return frozenset(self.needs())

    def problems(self) -> Iterator[str]:
        for section in ("loss", "advantages"):
            if section in self.config.model_fields_set:
                yield (
                    f"{section}: got a section for algorithms that learn from rewards with algorithm {self.name}; "
                    "expected none. Its settings are in section preference"
                )
        for key in sorted(self.has_no_use_for & self.config.preference.model_fields_set):
            value = getattr(self.config.preference, key)
            yield f"preference.{key}: got {value} with algorithm {self.name}, but it does not use the key; remove it"

    def samples_per_group(self) -> int:
        return 2

    def training_data(self, indexes: "IndexFolder | None", model: "ModelLimits") -> "Preferences":
        from rltrain.data.demonstrations import Preferences

        return Preferences(self.config, indexes, model)


class Dpo(FromPairs):
    """DPO: the actor learns to prefer the chosen response, relative to the reference."""

    name = "dpo"
    has_no_use_for = frozenset({"center_coef"})

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "reference": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        preference = self.config.preference
        if preference.loss == "ipo" and preference.label_smoothing:
            yield (
                f"preference.label_smoothing: got {preference.label_smoothing} with preference.loss ipo; expected 0, "
                "or preference.loss: sigmoid, since ipo has no probabilities to smooth"
            )

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.losses import direct_preference_loss

        return direct_preference_loss(self.config.preference)


class RewardModelling(FromPairs):
    """Reward models: an actor with a scalar head learns to score the chosen response above the rejected one."""

    name = "reward_model"
    has_no_use_for = frozenset({"loss", "beta", "label_smoothing", "sft_coef"})

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.losses import ranking_loss

        return ranking_loss(self.config.preference)


class Sft(Supervised):
    """SFT: the actor maximizes the likelihood of demonstrations.

    A run with the actor alone evaluates by the loss of held-out demonstrations. Evaluations by generated answers need
    more roles.
    """

    name = "sft"

    def needs(self) -> dict[str, str]:
        evaluating = ("evaluation",) if self.config.evaluates_apart else ("rollout", "reward")
        are_answered = self.config.evaluations and not self.config.scores_held_out
        needed = dict.fromkeys(evaluating, "data.eval") if are_answered else {}
        return {"actor": f"algorithm {self.name}", **needed}

    def usable_roles(self) -> frozenset[str]:
        apart, evaluates = self.config.evaluates_apart, bool(self.config.evaluations)
        evaluating = ("evaluation", *(() if apart else rewarding_roles()))
        return frozenset({*self.needs(), *(evaluating if evaluates else ())})

    def problems(self) -> Iterator[str]:
        yield from ()

    def training_data(self, indexes: "IndexFolder | None", model: "ModelLimits") -> "Demonstrations":
        from rltrain.data.demonstrations import Demonstrations

        return Demonstrations(self.config, indexes, model)

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.losses import likelihood_loss

        return likelihood_loss()
