"""Computing shared prefixes once changes no log-prob, gradient or metric, for every objective and parallel layout."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_prefixes import FAMILIES, FEW, OTHERS, Layouts
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, reports, run_case

TOLERANCE, OF_STATES = 1e-5, 5e-5
"""Largest relative differences. The decays of a delta net's states get sums over all tokens of large numbers with both
signs, in fp32."""
DECAYS = (".A_log", ".dt_bias", ".in_proj_ba.weight", ".in_proj_a.weight", ".in_proj.weight")


def all_of(folder: Path, objectives: Layouts) -> Ranks:
    return run_case("cases_prefixes:all_cases", folder=folder, objectives=objectives)


quick_world, slow_world = (made_once(partial(all_of, objectives=objectives)) for objectives in (FEW, OTHERS))


def cases(objectives: Layouts) -> list[tuple[str, str]]:
    return [(name, layout) for name, layouts in objectives.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), slow_but(cases(FEW) + cases(OTHERS), *cases(FEW)))
def test_log_probs_gradients_and_metrics_are_those_of_samples_alone(ranks: Ranks, name: str, layout: str) -> None:
    assert_equal(reports(ranks, f"{name}/{layout}"))


@made_once
def of_families(folder: Path) -> Ranks:
    names = dict(FAMILIES)
    return run_case("cases_prefixes:of_families", checkpoints=make_checkpoints(folder, names, num_hidden_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_so_are_those_of_windows_softcaps_sinks_and_states(of_families: Ranks, family: str, backend: str) -> None:
    assert_equal(reports(of_families, f"{family}/{backend}"))


def assert_equal(found: Sequence[dict[str, Any]]) -> None:
    assert found
    for report in found:
        unshared, shared = report.pop("rows")
        assert shared < 0.8 * unshared or unshared == 0
        limits = {key: OF_STATES if key.endswith(DECAYS) else TOLERANCE for key in report}
        assert {key: found for key, found in report.items() if not found <= limits[key]} == {}
