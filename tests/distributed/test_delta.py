"""Delta syncs by four real ranks, compared with full ones."""

import pytest

from tests.distributed.cases_delta import CHECKS, LOSES_BEFORE, SHARES, pairs
from tests.distributed.cases_reshard import union_of
from tests.support.worlds import Ranks, world

ranks = world("cases_delta:all_checks")


@pytest.mark.parametrize("check", CHECKS)
def test_every_run_equals_a_full_sync_bit_for_bit(check: str, ranks: Ranks) -> None:
    compared = 0
    for rank, results in enumerate(ranks):
        for placement, runs in results[check].items():
            assert [run["wrong"] for run in runs] == [[]] * len(SHARES), f"{placement} on rank {rank}"
            compared += len(runs)
    assert compared > 2 * len(SHARES)


def test_all_placements_are_checked(ranks: Ranks) -> None:
    for rank, results in enumerate(ranks):
        found = {placement for check in results.values() for placement in check}
        assert found == {placement for placement, _ in pairs() if rank in union_of(placement)}


@pytest.mark.parametrize("check", CHECKS)
def test_bytes_follow_what_changed(check: str, ranks: Ranks) -> None:
    for results in ranks:
        for runs in results[check].values():
            full, one_percent, nothing, _, everything = (run["moved"] for run in runs[:5])
            if not full:
                continue
            assert [number for number, run in enumerate(runs) if not run["compared"]] == [0, LOSES_BEFORE]
            assert nothing < one_percent < 0.6 * full, "headers are large compared with so small a model"
            assert everything <= full
            assert runs[2]["changed"] == 0 and runs[2]["compared"] > 0
            assert 0 < runs[1]["changed"] < 0.03 * runs[1]["compared"]
            assert runs[4]["changed"] <= runs[4]["encoded"] <= runs[4]["compared"]
            if "cast" not in check:
                assert runs[4]["changed"] == runs[4]["compared"]
            assert sum(run["sent"] for run in runs) > 0 or sum(run["received"] for run in runs) > 0
