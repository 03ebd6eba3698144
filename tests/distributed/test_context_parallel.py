"""Context parallelism changes no loss, no metric and no gradient, whatever is learnt and however else ranks share."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_context_parallel import LAYOUTS
from tests.distributed.torchrun import run_distributed

CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
RELATIVE, ABSOLUTE = 1e-5, 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("weights")
    case = "tests.distributed.cases_context_parallel:all_cases"
    return run_distributed(case, 4, {"folder": str(folder)}, timeout_s=300)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_metrics_and_gradient_norm_are_those_of_one_rank(
    ranks: list[dict[str, Any]], name: str, layout: str
) -> None:
    (alone,) = [rank[f"{name}/"] for rank in ranks if f"{name}/" in rank]
    found = [rank[f"{name}/{layout}"] for rank in ranks if f"{name}/{layout}" in rank]
    assert len(found) > 1
    for report in found:
        for step, wanted in zip(report["steps"], alone["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=RELATIVE, abs=ABSOLUTE)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_rank_is_told_of_all_tokens(ranks: list[dict[str, Any]], name: str, layout: str) -> None:
    (alone,) = [rank[f"{name}/"] for rank in ranks if f"{name}/" in rank]
    for rank in ranks:
        if f"{name}/{layout}" in rank:
            for values, wanted in zip(rank[f"{name}/{layout}"]["told"], alone["told"], strict=True):
                for value, its in zip(values, wanted, strict=True):
                    assert value == pytest.approx(its, abs=1e-3)
