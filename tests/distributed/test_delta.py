"""Syncs of what changed by four real ranks, against full ones."""

from typing import Any

import pytest

from tests.distributed.cases_delta import CHECKS, FULL_EVERY, LOSES_BEFORE, SHARES, pairs
from tests.distributed.cases_reshard import union_of
from tests.distributed.torchrun import run_distributed


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed("tests.distributed.cases_delta:all_checks", num_ranks=4, timeout_s=240)


@pytest.mark.parametrize("check", CHECKS)
def test_every_run_equals_a_full_sync_bit_for_bit(check: str, ranks: list[dict[str, Any]]) -> None:
    compared = 0
    for rank, results in enumerate(ranks):
        for placement, runs in results[check].items():
            assert [run["wrong"] for run in runs] == [[]] * len(SHARES), f"{placement} on rank {rank}"
            compared += len(runs)
    assert compared > 2 * len(SHARES)


def test_all_placements_are_checked(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        found = {placement for check in results.values() for placement in check}
        assert found == {placement for placement, _ in pairs() if rank in union_of(placement)}


@pytest.mark.parametrize("check", CHECKS)
def test_a_full_one_comes_first_in_turn_and_where_memory_was_lost(check: str, ranks: list[dict[str, Any]]) -> None:
    expected = [number in (0, LOSES_BEFORE) for number in range(len(SHARES))]
    since = 0
    for number in range(1, len(SHARES)):
        since = 0 if number == LOSES_BEFORE else since + 1
        if since == FULL_EVERY:
            expected[number], since = True, 0
    for results in ranks:
        for runs in results[check].values():
            assert [bool(run["whole"]) for run in runs] == expected


@pytest.mark.parametrize("check", CHECKS)
def test_bytes_follow_what_changed(check: str, ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        for runs in results[check].values():
            full, one_percent, nothing, _, everything = (run["moved"] for run in runs[:5])
            if not full:
                continue
            assert nothing < one_percent < 0.6 * full, "headers are a large part of so small a model"
            assert everything <= full
            assert runs[2]["changed"] == 0 and runs[2]["compared"] > 0
            assert 0 < runs[1]["changed"] < 0.03 * runs[1]["compared"]
            assert sum(run["sent"] for run in runs) > 0 or sum(run["received"] for run in runs) > 0
