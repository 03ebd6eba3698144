"""Ends or pauses a run, or warns, when trainer and engine drift apart."""

import logging
from collections.abc import Callable, Mapping

from rltrain.algorithms import parity
from rltrain.config.schema import Checks
from rltrain.errors import ParityError

logger = logging.getLogger(__name__)


class ParityGate:
    """`speaks`: whether this rank is the one that warns. `pause` has the job save and end, for the reason given."""

    def __init__(self, checks: Checks, *, speaks: bool, pause: Callable[[str], None]) -> None:
        self.action, self.speaks, self.pause = checks.action, speaks, pause
        self.limits = {
            ("checks.max_logprob_diff", parity.DIFFERENCE): checks.max_logprob_diff,
            ("checks.max_kl", parity.KL): checks.max_kl,
        }

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` are the step's, equal on all ranks of the actor. ParityError beyond a limit, with action stop."""
        beyond = [
            f"train/{metric} is {metrics[metric]:.3g}, {key} {limit:g}"
            for (key, metric), limit in self.limits.items()
            # A value that is not a number is beyond every limit.
            if limit is not None and metric in metrics and not metrics[metric] <= limit
        ]
        if not beyond:
            return
        said = (
            f"step {step}: the trainer's log-probs are far from those of the engine that drew the tokens with the same "
            f"weights: {'; '.join(beyond)}"
        )
        if self.action == "stop":
            raise ParityError(
                f"{said}. No checkpoint is saved of this step. tools/parity.py compares the two layer by layer on the "
                "last one that was exported; docs/precision.md says what precision alone does: raise the limit if that "
                "is all, set checks.action to warn to go on"
            )
        if self.action == "pause":
            self.pause(
                f"{said} (checks.action pause). tools/parity.py compares the two layer by layer; raise the limit, set "
                "checks.action to warn, or go back by checkpoint.resume to a checkpoint before"
            )
        elif self.speaks:
            logger.warning("%s (checks.action warn)", said)
