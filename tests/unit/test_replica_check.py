"""Which rank does not hold what its replicas hold."""

from hypothesis import given
from hypothesis import strategies as st

from rltrain.roles.trained import find_odd_rank

NAMES = [["a", "b"]] * 3


def test_equal_replicas_of_different_parts_are_fine() -> None:
    assert find_odd_rank([0, 1, 2, 3], [7, 8, 7, 8], [["a"], ["a", "b"]] * 2, [[1, 0], [5, 6], [1, 9], [5, 6]]) is None
    assert find_odd_rank([0, 1], [0, 1], [["a"], ["a"]], [[1], [2]]) is None, "no replicas"


def test_the_one_among_several_is_named_with_its_parameter() -> None:
    odd = find_odd_rank([4, 5, 6], [0, 0, 0], NAMES, [[1, 2], [1, 3], [1, 2]])
    assert str(odd) == "rank 5 holds other values of b than ranks 4, 6, which agree"


def test_of_two_nobody_knows_who_is_right() -> None:
    odd = find_odd_rank([4, 5], [0, 0], NAMES, [[1, 2], [3, 2]])
    assert str(odd) == "rank 5 and rank 4 hold different values of a, and either may be wrong"


@given(st.integers(3, 9), st.integers(0, 100), st.data())
def test_one_wrong_rank_is_found_wherever_it_is(count: int, value: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, count - 1))
    sums = [[value + (rank == wrong)] for rank in range(count)]
    odd = find_odd_rank(range(count), [0] * count, [["a"]] * count, sums)
    assert odd is not None and (odd.rank, odd.is_alone) == (wrong, True)
    assert odd.others == tuple(rank for rank in range(count) if rank != wrong)
