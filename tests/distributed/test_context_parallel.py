"""Context parallelism changes no loss, no metric and no gradient, whatever is learnt and however else ranks share."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_context_parallel import FEW, OTHERS, SHAPE, Layouts
from tests.support.tolerances import near
from tests.support.torchrun import run_distributed

RELATIVE, ABSOLUTE = 1e-5, 2e-6
TOLD = 3e-5
"""Largest difference of log-probs and scores after two updates."""
RESPONSE_TOKENS = sum(response for _, response in SHAPE)

Reports = list[dict[str, Any]]
"""By rank."""


def all_of(objectives: Layouts, folder: Path) -> Reports:
    arguments = {"folder": str(folder), "objectives": objectives}
    return run_distributed("tests.distributed.cases_context_parallel:all_cases", 4, arguments, timeout_s=300)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return all_of(FEW, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return all_of(OTHERS, tmp_path_factory.mktemp("others"))


def cases(objectives: Layouts) -> list[tuple[str, str]]:
    return [(name, layout) for name, layouts in objectives.items() for layout in layouts]


@pytest.mark.parametrize(("name", "layout"), cases(FEW))
def test_what_is_learnt_and_told_is_that_of_one_rank(few: Reports, name: str, layout: str) -> None:
    check(few, name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), cases(OTHERS))
def test_so_it_is_in_every_layout(others: Reports, name: str, layout: str) -> None:
    check(others, name, layout)


def check(ranks: Reports, name: str, layout: str) -> None:
    (alone,) = [rank[f"{name}/"] for rank in ranks if f"{name}/" in rank]
    found = [rank[f"{name}/{layout}"] for rank in ranks if f"{name}/{layout}" in rank]
    assert len(found) > 1 and all(report["steps"] == found[0]["steps"] for report in found), "all are told the same"
    for step, wanted in zip(found[0]["steps"], alone["steps"], strict=True):
        assert step == near(wanted, tokens=RESPONSE_TOKENS, samples=len(SHAPE) // 2, rel=RELATIVE, abs=ABSOLUTE)
    for report in found:  # replicas that share experts add up their tokens in orders of their own
        for values, wanted in zip(report["told"], alone["told"], strict=True):
            for value, its in zip(values, wanted, strict=True):
                assert value == pytest.approx(its, abs=TOLD)
