"""Computing shared prefixes once changes no log-prob, gradient or metric, for every objective and parallel layout."""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.cases_prefixes import FEW, OTHERS, Layouts
from tests.support.marks import slow_but
from tests.support.worlds import Ranks, made_once, reports, run_case

TOLERANCE = 1e-5


def all_of(folder: Path, objectives: Layouts) -> Ranks:
    return run_case("cases_prefixes:all_cases", folder=folder, objectives=objectives)


quick_world, slow_world = (made_once(partial(all_of, objectives=objectives)) for objectives in (FEW, OTHERS))


def cases(objectives: Layouts) -> list[tuple[str, str]]:
    return [(name, layout) for name, layouts in objectives.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), slow_but(cases(FEW) + cases(OTHERS), *cases(FEW)))
def test_log_probs_gradients_and_metrics_are_those_of_samples_alone(ranks: Ranks, name: str, layout: str) -> None:
    for report in reports(ranks, f"{name}/{layout}"):
        unshared, shared = report.pop("rows")
        assert shared < 0.8 * unshared
        assert {key: difference for key, difference in report.items() if not difference <= TOLERANCE} == {}
