"""SFT: the actor learns demonstrations by heart.

With the actor alone an evaluation is the loss of held-out demonstrations. Other roles are there to answer prompts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.algorithm import Algorithm
from rltrain.tasks.roles import rewarding_roles

if TYPE_CHECKING:
    from rltrain.algorithms.losses import LossFunction
    from rltrain.data.row_index import IndexFolder
    from rltrain.data.supervised import Demonstrations
    from rltrain.data.tokenizer import ModelLimits


class Sft(Algorithm):
    name = "sft"
    generates = False
    reads_responses = True

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

    def samples_per_group(self) -> int:
        return 1

    def needs_actor_logprobs(self) -> bool:
        return False

    def temperature(self) -> float:
        return 1.0

    def longest_response(self) -> int | None:
        return self.config.data.max_response_tokens

    def training_data(self, indexes: "IndexFolder | None", model: "ModelLimits") -> "Demonstrations":
        from rltrain.data.supervised import Demonstrations

        return Demonstrations(self.config, indexes, model)

    def loss_function(self) -> "LossFunction":
        from rltrain.algorithms.likelihood import likelihood_loss

        return likelihood_loss()
