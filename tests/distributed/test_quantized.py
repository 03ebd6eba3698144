"""FP8 syncs by four real ranks, equal bit for bit to quantising whole tensors."""

import pytest

from tests.distributed.cases_quantized import CASES, KINDS, union_of
from tests.support.worlds import Ranks, world

pytestmark = pytest.mark.slow  # tests/unit/test_embedded_families.py has a quick part

WAYS = ["full_gather", "wired", "shared", "wired again", "shared again"]


ranks = world("cases_quantized:all_syncs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_placement_equals_the_oracle(kind: str, way: str, ranks: Ranks) -> None:
    compared = 0
    for rank, results in enumerate(ranks):
        for placement, architecture, case_kind in CASES:
            if case_kind == kind and rank in union_of(placement):
                found = results[f"{placement}, {architecture}, {kind}"]
                assert found[way] == [], f"{placement}, {architecture} on rank {rank}"
                assert found["wrong before"] > found["compared"] / 2 or not found["compared"]
                compared += found["compared"]
    assert compared > 10


def test_the_cases_are_worth_trying(ranks: Ranks) -> None:
    """They include blocks of several ranks, boxes that fan out, and ranks in one layout only."""
    quantised = {name: found for results in ranks for name, found in results.items() if name.endswith("fp8")}
    assert max(found["split"] for found in quantised.values()) > 40
    assert sum(found["fanned out"] > 0 for found in quantised.values()) >= 3
    assert max(found["rounds"] for found in quantised.values()) > 5
    assert any(found["compared"] == 0 for results in ranks for found in results.values())
