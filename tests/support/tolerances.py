"""Tolerances for comparisons of floats on every processor."""

from collections.abc import Mapping
from typing import Any

import pytest

ADAM_EPS = 1e-4
"""Tests that compare models after updates give this eps to Adam.

Adam divides a gradient by the root of its mean square plus eps. Some gradients are zero except for rounding. With the
default eps of 1e-8 these weights move by a whole learning rate. Each processor rounds in its own way. The value 1e-4 is
much larger than the rounding errors of the gradients in tests. Most of the gradients themselves are larger still.
"""
EPS_OF_ACTOR, EPS_OF_CRITIC = (f"{role}.optimizer.eps={ADAM_EPS}" for role in ("actor", "critic"))
"""Overrides that set the same eps in the config of a whole job."""

OF_TOKENS = (
    *("pg_clipfrac", "dual_clipfrac", "value_clipfrac", "covariance_tokens"),
    *("tis_clipped", "rejected_tokens", "replayed_choices_differing"),
)
OF_SAMPLES = ("rejected_sequences", "accuracy")
"""Metrics that are shares of response tokens or of samples beyond a threshold."""


def near(
    metrics: Mapping[str, float], *, rel: float, abs: float | None = None, tokens: int, samples: int | None = None
) -> dict[str, Any]:
    """Returns a dict equal to all metrics that differ from `metrics` only by rounding.

    `rel` and `abs` are the tolerances of pytest.approx. A share may differ by one of its `tokens` or `samples`, because
    rounding can move a value across a threshold.
    """
    one = dict.fromkeys(OF_TOKENS, 1 / tokens) | (dict.fromkeys(OF_SAMPLES, 1 / samples) if samples else {})

    def allowed(name: str, value: float) -> Any:
        share = one.get(name.rpartition("/")[2])
        return pytest.approx(value, rel=rel, abs=abs) if share is None else pytest.approx(value, abs=1.001 * share)

    return {name: allowed(name, value) for name, value in metrics.items()}
