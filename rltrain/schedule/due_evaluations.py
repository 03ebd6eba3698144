"""Which evaluation sets are due when, and which steps are judged by them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.config.schema import Config, EvaluationPlan


@dataclass(frozen=True)
class DueEvaluations:
    """`of` finds them."""

    plans: Sequence[EvaluationPlan]
    last_step: int
    best_metric: str | None
    stop_metric: str | None

    @classmethod
    def of(cls, config: Config) -> "DueEvaluations":
        keep_best = config.evaluation.keep_best
        return cls(config.evaluations, config.steps, keep_best.metric if keep_best else None, config.stop_metric)

    def sets(self, step: int) -> list[int]:
        """Those to be evaluated before training on the step, by number."""
        return [number for number, plan in enumerate(self.plans) if plan.is_due(step, self.last_step)]

    def finds_best(self, step: int) -> bool:
        """Whether the policy may turn out the best so far."""
        return self._is_reported(self.best_metric, step)

    def may_end(self, step: int) -> bool:
        """Whether it may turn out good enough."""
        return self._is_reported(self.stop_metric, step)

    def _is_reported(self, metric: str | None, step: int) -> bool:
        return metric is not None and any(self.plans[number].reports(metric) for number in self.sets(step))
