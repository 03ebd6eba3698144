"""Megatron's model of every family, loaded from files in many parallel layouts, has transformers' logits."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.family_checkpoints import (
    DENSE,
    DENSE_VARIANTS,
    QUICK_DENSE,
    QUICK_SPARSE,
    SPARSE,
    SPARSE_VARIANTS,
    make_family_checkpoint,
)
from tests.support.torchrun import run_distributed

FIRST_DENSE, FIRST_SPARSE = "tp2_pp2", "tp2_ep2"
OTHER_DENSE = ["tp2_sequence_parallel", "tp4"]
OTHER_SPARSE = ["tp2_sequence_parallel", "tp2_ep4_etp1", "pp2_ep2"]
FEW = dict.fromkeys(QUICK_DENSE, [FIRST_DENSE]) | dict.fromkeys(QUICK_SPARSE, [FIRST_SPARSE])
OTHERS = {name: [FIRST_DENSE, *OTHER_DENSE][name in QUICK_DENSE :] for name in DENSE}
OTHERS |= {name: [FIRST_SPARSE, *OTHER_SPARSE][name in QUICK_SPARSE :] for name in SPARSE}
OTHERS |= dict.fromkeys(DENSE_VARIANTS, ["tp2_pp2"]) | dict.fromkeys(SPARSE_VARIANTS, ["tp2_ep2"])
TOLERANCE = 1e-4

Reports = list[dict[str, Any]]
"""By rank."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("families")
    return folder


def load_all(folder: Path, layouts: dict[str, list[str]]) -> Reports:
    for name in layouts:
        if not (folder / name).exists():
            make_family_checkpoint(name, folder / name)
    arguments = {"checkpoints": layouts, "folder": str(folder)}
    return run_distributed("tests.distributed.cases_family_logits:differences", 4, arguments, timeout_s=300)


@pytest.fixture(scope="module")
def few(checkpoints: Path) -> Reports:
    return load_all(checkpoints, FEW)


@pytest.fixture(scope="module")
def others(checkpoints: Path) -> Reports:
    return load_all(checkpoints, OTHERS)


def cases(layouts: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, layout) for name in layouts for layout in layouts[name]]


@pytest.mark.parametrize(("name", "layout"), cases(FEW))
def test_logits_are_those_of_transformers(few: Reports, name: str, layout: str) -> None:
    check(few, name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), cases(OTHERS))
def test_they_are_in_every_layout(others: Reports, name: str, layout: str) -> None:
    check(others, name, layout)


def check(ranks: Reports, name: str, layout: str) -> None:
    found = [rank[f"{name}/{layout}"] for rank in ranks if f"{name}/{layout}" in rank]
    assert all(report["names_and_shapes"] for report in found), "parameters are those of the layout"
    differences = [report["difference"] for report in found if report["difference"] is not None]
    assert differences
    assert max(differences) < TOLERANCE
