"""Which syncs send everything, which what changed, and which are compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.reshard.delta import DENSE_SHARE, FIRST_REST, LONGEST_REST, DeltaTurn, DeltaTurns

PLAIN, WHOLE, CHANGES = DeltaTurn.PLAIN, DeltaTurn.WHOLE, DeltaTurn.CHANGES


def taken(turns: DeltaTurns, count: int, share: float = 0.1) -> list[DeltaTurn]:
    found = []
    for _ in range(count):
        found.append(turns.next(lost=False))
        turns.finished(found[-1], share)
    return found


def test_everything_is_sent_first_every_so_often_and_where_it_was_lost() -> None:
    turns = DeltaTurns(3)
    assert taken(turns, 5) == [WHOLE, CHANGES, CHANGES, WHOLE, CHANGES]
    assert turns.next(lost=True) is WHOLE
    turns.finished(WHOLE)
    assert turns.next(lost=False) is CHANGES  # and does not come to its end
    assert turns.next(lost=False) is WHOLE


def test_where_comparing_saves_nothing_it_is_tried_ever_more_seldom() -> None:
    turns, found = DeltaTurns(1000), []
    while len(found) < 400:
        found += taken(turns, 1, share=DENSE_SHARE)
    tried = [number for number, turn in enumerate(found) if turn is CHANGES]
    rests = [later - earlier - 2 for earlier, later in zip(tried, tried[1:], strict=False)]
    assert rests[:4] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST, 8 * FIRST_REST]
    assert max(rests) == LONGEST_REST and found.count(PLAIN) == sum(rests) + LONGEST_REST - (tried[-1] + 65 - 400)
    sparse = taken(turns, LONGEST_REST + 3)
    assert sparse[-2:] == [CHANGES, CHANGES], "it is found when few change again"


def test_where_every_sync_finds_its_destination_lost_nothing_is_remembered_for_long() -> None:
    turns, found = DeltaTurns(50), []
    for _ in range(40):
        found.append(turns.next(lost=True))
        turns.finished(found[-1])
    assert CHANGES not in found and found.count(WHOLE) <= 4


@pytest.mark.parametrize(("every", "expected"), [(0, [1]), (3, [1, 3, 6, 9])])
def test_the_first_and_every_nth_sync_of_changes_is_compared(every: int, expected: list[int]) -> None:
    turns, compared, count = DeltaTurns(100, every), [], 0
    for _ in range(11):
        turn = turns.next(lost=False)
        count += turn is CHANGES
        compared += [count] if turns.compares else []
        turns.finished(turn, 0.1)
    assert compared == expected


def test_behind_a_difference_all_are_compared() -> None:
    turns = DeltaTurns(100)
    taken(turns, 5)
    assert turns.next(lost=False) is CHANGES and not turns.compares
    turns.differed()
    turns.finished(WHOLE)
    assert turns.next(lost=False) is CHANGES and turns.compares


@given(
    st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), max_size=60)
)
def test_changes_are_sent_only_to_those_that_have_all_of_the_sync_before(
    full_every: int, events: list[tuple[bool, bool, float]]
) -> None:
    """Whatever is lost, fails or saves nothing."""
    turns, remembers, since = DeltaTurns(full_every), False, 0
    for lost, fails, share in events:
        turn = turns.next(lost=lost)
        if turn is CHANGES:
            since += 1
            assert remembers and not lost and since < full_every
        else:
            since = 0
        remembers = turn is not PLAIN and not fails
        if not fails:
            turns.finished(turn, share)
