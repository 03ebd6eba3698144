"""How many samples reward functions may fail on before the job ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.config import schema
from rltrain.errors import RewardError
from rltrain.rewards.scorer import Part
from rltrain.roles.reward_statistics import RewardStatistics, prefix


class FailureLimit:
    """Of the reward's parts, or those of an evaluation set's own reward, over the tasks of a run."""

    def __init__(self, parts: Sequence[Part], settings: schema.Reward) -> None:
        self.parts, self.settings = parts, settings
        self.has_judged = False

    def judge(self, task: str, sums: Mapping[str, float], first_failures: Mapping[str, str]) -> None:
        """Raise RewardError if a function failed on more samples of `task` than may, or on all of the first task's.

        `sums` and `first_failures` are of all ranks of the role, as RewardStatistics has them.
        """
        is_first, self.has_judged = not self.has_judged, True
        num_samples, settings = int(sums["samples"]), self.settings

        def are_too_many(num_failed: int) -> bool:
            return num_failed > settings.max_failures * num_samples or (is_first and num_failed == num_samples)

        rule = (
            "Expected a number for every response, 0 for one that deserves nothing: the job ends where more than "
            f"reward.max_failures = {settings.max_failures:g} of a step's samples fail, or all of the first."
        )
        for part in self.parts:
            errors, timeouts = (int(sums[f"{prefix(part.title)}_{kind}"]) for kind in ("errors", "timeouts"))
            if are_too_many(errors + timeouts):
                raise RewardError(
                    f"{part.key}: {part.place} failed on {errors + timeouts} of {num_samples} "
                    f"samples of {task}: {errors} by an error, {timeouts} by taking longer than reward.timeout_s = "
                    f"{settings.timeout_s:g}. {rule} The first failure was {first_failures.get(part.title)}"
                )
        unscored = int(sums["reward_unscored"])
        if are_too_many(unscored):
            raise RewardError(
                f"reward: every function returned None for {unscored} of {num_samples} samples of {task}. {rule}"
            )

    def judged(self, task: str, gathered: Sequence[Any]) -> dict[str, float]:
        """Metrics of what ranks have recorded: [statistics, first failures, ...] each. RewardError as by `judge`."""
        records = [record for record, *_ in gathered]
        first_failures = {title: failure for _, of, *_ in reversed(gathered) for title, failure in of.items()}
        self.judge(task, RewardStatistics.sums_of(records), first_failures)
        return RewardStatistics.metrics(records)
