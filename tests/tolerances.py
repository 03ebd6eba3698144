"""What comparisons of floats allow for, so that they hold on every processor."""

from collections.abc import Mapping
from typing import Any

import pytest

ADAM_EPS = 1e-4
"""The eps of Adam in tests that compare models after updates.

Adam divides the mean of an element's gradients by the root of the mean of their squares, plus eps. Where a gradient is
zero but for rounding, the default eps of 1e-8 makes a whole step of that rounding, which each processor does otherwise.
1e-4 is far above what rounding leaves of tests' gradients, and far below most of them.
"""
EPS_OF_ACTOR, EPS_OF_CRITIC = (f"{role}.optimizer.eps={ADAM_EPS}" for role in ("actor", "critic"))
"""The same as overrides of a whole job's config."""

OF_TOKENS = (
    *("pg_clipfrac", "dual_clipfrac", "value_clipfrac", "covariance_tokens"),
    *("tis_clipped", "rejected_tokens", "replayed_choices_differing"),
)
OF_SAMPLES = ("rejected_sequences", "accuracy")
"""Metrics that are shares of response tokens or of samples, those whose value is beyond a threshold."""


def near(
    metrics: Mapping[str, float], *, rel: float, abs: float | None = None, tokens: int, samples: int | None = None
) -> dict[str, Any]:
    """Returns what is equal to metrics that differ from `metrics` by rounding.

    That is up to `rel` and `abs`, as pytest.approx has them. A share may differ by one of its `tokens` or `samples`:
    rounding can move a value that is beside a threshold to the other side.
    """
    one = dict.fromkeys(OF_TOKENS, 1 / tokens) | (dict.fromkeys(OF_SAMPLES, 1 / samples) if samples else {})

    def allowed(name: str, value: float) -> Any:
        share = one.get(name.rpartition("/")[2])
        return pytest.approx(value, rel=rel, abs=abs) if share is None else pytest.approx(value, abs=1.001 * share)

    return {name: allowed(name, value) for name, value in metrics.items()}
