"""Communicators released between tasks and reopened, on real ranks at different positions."""

from tests.distributed.cases_communicators import WORLD_SIZE
from tests.support.worlds import run_case


def test_overlapping_groups_come_back_without_a_deadlock_and_reduce_over_their_ranks():
    """Every step reopens those of the critic, the reference and the rollout, because their ranks have other roles
    too."""
    for rank in run_case("cases_communicators:run_all_tasks", WORLD_SIZE):
        assert all(rank[how]["wrong"] == 0 and rank[how]["right"] > 20 for how in ("whole", "stopped"))
        assert rank["whole"]["generations"] > 12


def test_a_group_answers_as_before_when_it_was_made_again():
    first, middle, last = run_case("cases_communicators:use_one_group", 3)
    for index, answers in enumerate((first, last)):
        numbers = [0.0, 2.0, 2.0 * (index + 1), 2.0, 2.0 - 2.0 * index]
        assert answers[:3] == [[numbers, index, 2, "gloo"]] * 3
        assert "over ranks (0, 2) was released" in answers[3]
    assert middle == []


def test_a_group_may_be_released_while_others_are_still_making_it():
    """A member without use for the group continues at once."""
    assert run_case("cases_communicators:release_at_once", WORLD_SIZE) == [30] * 4
