"""FP8 syncs by four real ranks, equal bit for bit to quantising whole tensors."""

from typing import Any

import pytest

from tests.distributed.cases_quantized import KINDS, PLACEMENTS, QUICK, SLOW
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # tests/unit/test_embedded_families.py has a quick part

WAYS = ["full_gather", "wired", "shared", "wired again", "shared again"]


@pytest.fixture(scope="module")
def quick_world() -> list[dict[str, Any]]:
    return world_of(QUICK)


@pytest.fixture(scope="module")
def slow_world() -> list[dict[str, Any]]:
    return world_of(SLOW)


def world_of(cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    return run_distributed("tests.distributed.cases_quantized:all_syncs", 4, {"cases": cases}, timeout_s=240)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_placement_equals_the_oracle(kind: str, way: str, ranks: list[dict[str, Any]]) -> None:
    check(QUICK, kind, way, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({kind for *_, kind in SLOW}))
@pytest.mark.parametrize("way", WAYS)
def test_so_does_every_other_one(kind: str, way: str, ranks: list[dict[str, Any]]) -> None:
    check(SLOW, kind, way, ranks)


def check(cases: list[tuple[str, str, str]], kind: str, way: str, ranks: list[dict[str, Any]]) -> None:
    compared = 0
    for rank, results in enumerate(ranks):
        for placement, architecture, case_kind in cases:
            actor, rollout, _ = PLACEMENTS[placement]
            if case_kind == kind and rank in (*actor[0], *rollout[0]):
                found = results[f"{placement}, {architecture}, {kind}"]
                assert found[way] == [], f"{placement}, {architecture} on rank {rank}"
                assert found["wrong before"] > found["compared"] / 2 or not found["compared"]
                compared += found["compared"]
    assert compared > 10


@pytest.mark.slow
def test_the_cases_are_worth_trying(ranks: list[dict[str, Any]]) -> None:
    """Blocks of several ranks, boxes that fan out, and ranks in one layout only are among them."""
    quantised = {name: found for results in ranks for name, found in results.items() if name.endswith("fp8")}
    assert max(found["split"] for found in quantised.values()) > 40
    assert sum(found["fanned out"] > 0 for found in quantised.values()) >= 3
    assert max(found["rounds"] for found in quantised.values()) > 5
    assert any(found["compared"] == 0 for results in ranks for found in results.values())
