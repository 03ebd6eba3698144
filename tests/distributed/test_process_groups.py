"""Process groups of overlapping roles on real ranks."""

import pytest

from rltrain.runtime.placement import group_lists
from tests.distributed.cases_process_groups import GRIDS, WORLD_SIZE
from tests.support.torchrun import run_distributed

# To torch "cpu:gloo" is another backend than "gloo": it takes the path of a device backend, with gloo groups beside it.
BACKENDS = {"gloo": 1, "cpu:gloo": 2}


@pytest.fixture(scope="module")
def results():
    case = "tests.distributed.cases_process_groups:reduce_over_every_group"
    return run_distributed(case, num_ranks=WORLD_SIZE, arguments={"backends": list(BACKENDS)})


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def by_rank(results, backend):
    return [result[backend] for result in results]


@pytest.mark.parametrize("kind", ["compute", "cpu"])
def test_each_group_reduces_over_its_ranks_in_rank_order(by_rank, kind):
    lists = group_lists(GRIDS)
    for rank, result in enumerate(by_rank):
        expected = [[list(ranks), sum(ranks), ranks.index(rank), len(ranks)] for ranks in lists if rank in ranks]
        assert result[kind] == expected


def test_gloo_groups_stand_beside_those_of_another_backend_and_are_the_same_for_gloo(by_rank, backend):
    for result in by_rank:
        assert result["cpu_backends"] == ["gloo"]
        assert result["num_distinct"] == BACKENDS[backend] * len(result["compute"])


def test_a_group_that_does_not_hold_the_rank_is_refused_with_those_that_do(by_rank):
    for rank, result in enumerate(by_rank):
        assert f"rank {rank} has no process group over ranks" in result["refusal"]
        assert "0-5" in result["refusal"]


def test_lists_that_are_not_ascending_are_refused(results):
    for result in results:
        for ranks, message in result["refusals"].items():
            assert f"ascending distinct ranks, got {ranks}" in message
