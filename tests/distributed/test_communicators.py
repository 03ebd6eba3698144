"""Communicators that are released between tasks and made again, on real ranks that are not in step."""

import pytest

from tests.distributed.cases_communicators import WORLD_SIZE
from tests.support.torchrun import run_distributed


@pytest.fixture(scope="module")
def ranks():
    return run_distributed("tests.distributed.cases_communicators:run_all_tasks", WORLD_SIZE, timeout_s=90)


@pytest.mark.parametrize("how", ["whole", "stopped"])
def test_overlapping_groups_come_back_without_a_deadlock_and_reduce_over_their_ranks(ranks, how):
    for rank in ranks:
        assert rank[how]["wrong"] == 0 and rank[how]["right"] > 20


def test_groups_were_made_anew(ranks):
    """Once in every step: those of the critic, the reference and the rollout, whose ranks all have other roles."""
    for rank in ranks:
        assert rank["whole"]["generations"] > 12


def test_a_group_answers_as_before_when_it_was_made_again():
    first, middle, last = run_distributed("tests.distributed.cases_communicators:use_one_group", 3, timeout_s=90)
    for index, answers in enumerate((first, last)):
        numbers = [0.0, 2.0, 2.0 * (index + 1), 2.0, 2.0 - 2.0 * index]
        assert answers[:3] == [[numbers, index, 2, "gloo"]] * 3
        assert "over ranks (0, 2) was released" in answers[3]
    assert middle == []


def test_a_group_may_be_released_while_others_are_still_making_it():
    """A member that has no use for it goes on at once."""
    assert (
        run_distributed("tests.distributed.cases_communicators:release_at_once", WORLD_SIZE, timeout_s=90) == [30] * 4
    )
