"""No training: the rollout draws the evaluation sets with the weights of model.path, and the reward scores them."""

from collections.abc import Iterator

from rltrain.algorithms.algorithm import Algorithm
from rltrain.tasks.roles import ENV, rewarding_roles


class Evaluate(Algorithm):
    name = "evaluate"
    generates = False
    trains = False

    def needs(self) -> dict[str, str]:
        return dict.fromkeys(("rollout", "reward"), "algorithm evaluate")

    def usable_roles(self) -> frozenset[str]:
        return frozenset({*self.needs(), ENV.name, *rewarding_roles()})

    def problems(self) -> Iterator[str]:
        if not self.config.evaluations:
            yield "evaluation.sets: got none, and no data.eval; expected either: algorithm evaluate does nothing else"

    def samples_per_group(self) -> int:
        return 1

    def needs_actor_logprobs(self) -> bool:
        return False
