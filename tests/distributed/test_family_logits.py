"""Megatron's model of every family, loaded from files in many parallel layouts, has transformers' logits."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.family_checkpoints import DENSE, SPARSE, make_family_checkpoint
from tests.distributed.torchrun import run_distributed

DENSE_LAYOUTS = ["one_rank", "tp2_sequence_parallel", "pp2", "tp2_pp2", "tp4"]
SPARSE_LAYOUTS = ["one_rank", "tp2", "tp2_sequence_parallel", "tp2_pp2", "ep2", "tp2_ep2", "tp2_ep4_etp1", "pp2_ep2"]
LAYOUTS = {**dict.fromkeys(DENSE, DENSE_LAYOUTS), **dict.fromkeys(SPARSE, SPARSE_LAYOUTS)}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("families")
    for name in LAYOUTS:
        make_family_checkpoint(name, folder / name)
    return run_distributed(
        "tests.distributed.cases_family_logits:differences",
        num_ranks=4,
        arguments={"checkpoints": LAYOUTS, "folder": str(folder)},
        timeout_s=300,
    )


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_logits_are_those_of_transformers(ranks: list[dict[str, Any]], name: str, layout: str) -> None:
    found = [rank[f"{name}/{layout}"] for rank in ranks if f"{name}/{layout}" in rank]
    assert all(report["names_and_shapes"] for report in found), "parameters are those of the layout"
    differences = [report["difference"] for report in found if report["difference"] is not None]
    assert differences
    assert max(differences) < TOLERANCE
