"""Staleness of a step's samples: counts of chunks and replicas as metrics."""

import pytest

from rltrain.roles.actor import StalenessCounts

FIRST = {"stale_samples": 1, "stale_tokens": 5, "tokens": 20, "staleness_sum": 30, "staleness_max": 2}
SECOND = {"stale_samples": 2, "stale_tokens": 7, "tokens": 30, "staleness_sum": 20, "staleness_max": 4}


def test_chunks_add_up_and_the_oldest_counts():
    counts = StalenessCounts()
    counts.add(SECOND)
    counts.add(FIRST)
    assert counts.longest == 4
    assert StalenessCounts.metrics(counts.sums(), counts.longest) == pytest.approx(
        {"stale_samples": 3, "stale_tokens": 12, "staleness_mean": 1.0, "staleness_max": 4}
    )


def test_a_step_of_which_nothing_is_left_has_no_staleness():
    assert StalenessCounts.metrics(StalenessCounts().sums(), 0)["staleness_mean"] == 0
