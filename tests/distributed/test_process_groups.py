"""Process groups of overlapping roles on real ranks."""

import pytest

from rltrain.runtime.placement import group_lists
from tests.distributed.cases_process_groups import GRIDS, WORLD_SIZE
from tests.support.worlds import world

# To torch "cpu:gloo" is another backend than "gloo": it is handled like a device backend, with gloo groups in addition.
BACKENDS = {"gloo": 1, "cpu:gloo": 2}


results = world("cases_process_groups:reduce_over_every_group", WORLD_SIZE, backends=list(BACKENDS))
OF_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)


@OF_BACKENDS
@pytest.mark.parametrize("kind", ["compute", "cpu"])
def test_each_group_reduces_over_its_ranks_in_rank_order(results, backend, kind):
    lists = group_lists(GRIDS)
    for rank, result in enumerate(results):
        expected = [[list(ranks), sum(ranks), ranks.index(rank), len(ranks)] for ranks in lists if rank in ranks]
        assert result[backend][kind] == expected


@OF_BACKENDS
def test_gloo_groups_stand_beside_those_of_another_backend_and_are_the_same_for_gloo(results, backend):
    for result in (result[backend] for result in results):
        assert result["cpu_backends"] == ["gloo"]
        assert result["num_distinct"] == BACKENDS[backend] * len(result["compute"])


@OF_BACKENDS
def test_a_group_that_does_not_hold_the_rank_is_refused_with_those_that_do(results, backend):
    for rank, result in enumerate(results):
        refusal = result[backend]["refusal"]
        assert f"rank {rank} has no process group over ranks" in refusal and "0-5" in refusal


def test_lists_that_are_not_ascending_are_refused(results):
    for result in results:
        for ranks, message in result["refusals"].items():
            assert f"ascending distinct ranks, got {ranks}" in message
