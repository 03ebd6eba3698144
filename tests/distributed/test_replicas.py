"""Replicas with different weights end the run, with the rank and the parameter."""

import re

import pytest

from tests.support.worlds import run_case


@pytest.mark.parametrize(
    ("dp", "named"),
    [
        (2, r"rank 3 and rank 1 hold different values of \S+, and either may be wrong"),
        (4, "rank 3 holds other values of .* than ranks 0, 1, 2, which agree"),
    ],
)
def test_a_bit_that_turned_over_is_found_when_it_is_looked_for(dp: int, named: str) -> None:
    told = run_case("cases_replicas:compared", dp=dp)
    first = told[0]
    assert all(one == first for one in told), "the same on every rank"
    assert first["equal"] == first["unasked"] == ""
    assert re.search(f"step 5: replicas of the actor are no longer equal .*: {named}", first["different"])


def test_what_replicas_have_is_put_behind_each_other_on_every_rank() -> None:
    """First two ranks a replica, with one number and none; then one rank each."""
    for tp, numbers in ((2, [0]), (1, [0, 10, 11, 20, 21, 22])):
        told = run_case("cases_replicas:put_behind_each_other", tp=tp)
        expected = {"numbers": numbers, "truths": [bool(number) for number in numbers]}
        assert all(one == expected for one in told)
