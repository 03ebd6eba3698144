"""Says when the samples of a prompt all have the same reward, which teaches a group-relative algorithm nothing."""

import logging
from collections.abc import Mapping

from rltrain.roles.reward_statistics import FLAT_GROUPS

logger = logging.getLogger(__name__)

ADVICE = (
    "Look at the responses and rewards in samples.jsonl: the reward function may be wrong for the task, or the prompts "
    "too hard or too easy for the model (batch.dynamic_sampling draws others in their place)"
)


class FlatRewards:
    """Watches the steps of a run.

    The first step in which no group has a spread of rewards is logged once. A row of `warn_after` such steps is a
    warning, once per row; None turns the warning off.
    """

    def __init__(self, warn_after: int | None) -> None:
        self.warn_after = warn_after
        self._first_step: int | None = None
        self._num_steps = 0
        self._has_said = False

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` are those of the step's rewards."""
        if metrics.get(FLAT_GROUPS) != 1.0:
            self._first_step, self._num_steps = None, 0
            return
        if self._first_step is None:
            self._first_step = step
        self._num_steps += 1
        if self._num_steps == self.warn_after:
            logger.warning(
                "in %d steps in a row, since step %d, 100 %% of the groups have no spread of rewards: the reward "
                "teaches nothing. %s",
                *(self._num_steps, self._first_step, ADVICE),
            )
        elif not self._has_said:
            logger.info(
                "step %d: 100 %% of the groups have no spread of rewards (mean %.3g): the reward teaches nothing. %s",
                *(step, metrics["reward_mean"], ADVICE),
            )
        self._has_said = True
