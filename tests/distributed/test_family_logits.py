"""Megatron's model of every family, loaded from files in many parallel layouts, has transformers' logits."""

from functools import partial
from pathlib import Path

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
from tests.support.marks import slow_but
from tests.support.worlds import Ranks, made_once, reports, run_case

FIRST_DENSE, FIRST_SPARSE = "tp2_pp2", "tp2_ep2"
OTHER_DENSE = ["tp2_sequence_parallel", "tp4"]
OTHER_SPARSE = ["tp2_sequence_parallel", "tp2_ep4_etp1", "pp2_ep2"]
FEW = dict.fromkeys(QUICK_DENSE, [FIRST_DENSE]) | dict.fromkeys(QUICK_SPARSE, [FIRST_SPARSE])
OTHERS = {name: [FIRST_DENSE, *OTHER_DENSE][name in QUICK_DENSE :] for name in DENSE}
OTHERS |= {name: [FIRST_SPARSE, *OTHER_SPARSE][name in QUICK_SPARSE :] for name in SPARSE}
OTHERS |= dict.fromkeys(DENSE_VARIANTS, ["tp2_pp2"]) | dict.fromkeys(SPARSE_VARIANTS, ["tp2_ep2"])
TOLERANCE = 1e-4


def load_all(folder: Path, layouts: dict[str, list[str]]) -> Ranks:
    for name in layouts:
        make_family_checkpoint(name, folder / name)
    return run_case("cases_family_logits:differences", checkpoints=layouts, folder=folder)


quick_world, slow_world = (made_once(partial(load_all, layouts=layouts)) for layouts in (FEW, OTHERS))


def cases(layouts: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, layout) for name in layouts for layout in layouts[name]]


@pytest.mark.parametrize(("name", "layout"), slow_but(cases(FEW) + cases(OTHERS), *cases(FEW)))
def test_logits_are_those_of_transformers(ranks: Ranks, name: str, layout: str) -> None:
    found = reports(ranks, f"{name}/{layout}")
    assert all(report["names_and_shapes"] for report in found), "parameters are those of the layout"
    differences = [report["difference"] for report in found if report["difference"] is not None]
    assert differences and max(differences) < TOLERANCE
