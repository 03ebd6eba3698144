"""Context parallelism changes no loss, metric or gradient, for every objective and beside other parallelism."""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.cases_context_parallel import FEW, OTHERS, SHAPE, Layouts
from tests.support.marks import slow_but
from tests.support.tolerances import near
from tests.support.worlds import Ranks, made_once, reports, run_case

RELATIVE, ABSOLUTE = 1e-5, 2e-6
TOLD = 3e-5
"""Largest difference of log-probs and scores after two updates."""
RESPONSE_TOKENS = sum(response for _, response in SHAPE)


def all_of(folder: Path, objectives: Layouts) -> Ranks:
    return run_case("cases_context_parallel:all_cases", folder=folder, objectives=objectives)


quick_world, slow_world = (made_once(partial(all_of, objectives=objectives)) for objectives in (FEW, OTHERS))


def cases(objectives: Layouts) -> list[tuple[str, str]]:
    return [(name, layout) for name, layouts in objectives.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), slow_but(cases(FEW) + cases(OTHERS), *cases(FEW)))
def test_what_is_learnt_and_told_is_that_of_one_rank(ranks: Ranks, name: str, layout: str) -> None:
    (alone,) = reports(ranks, f"{name}/")
    found = reports(ranks, f"{name}/{layout}")
    assert len(found) > 1 and all(report["steps"] == found[0]["steps"] for report in found), "all ranks report the same"
    for step, wanted in zip(found[0]["steps"], alone["steps"], strict=True):
        assert step == near(wanted, tokens=RESPONSE_TOKENS, samples=len(SHAPE) // 2, rel=RELATIVE, abs=ABSOLUTE)
    for report in found:  # replicas that share experts sum their tokens in different orders
        for values, wanted in zip(report["told"], alone["told"], strict=True):
            for value, its in zip(values, wanted, strict=True):
                assert value == pytest.approx(its, abs=TOLD)
