"""Which groups make up a step, where they are entered when they are done, and which may be begun ahead of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.generation_loop import StreamRules
from rltrain.rollout.rollout_state import Consumed

OWN_LOGS = StreamRules(num_groups=24, per_step=6, num_chunks=3)
SHARED = StreamRules(num_groups=24, per_step=6, num_chunks=3, shared_log="run", done=Consumed(6), num_ahead=4)


def test_a_step_of_its_own_log_takes_the_groups_at_its_own_positions():
    assert [OWN_LOGS.log_of(position) for position in (0, 5, 6, 23)] == ["step 0", "step 0", "step 1", "step 3"]
    assert OWN_LOGS.entries_of(2, 1) == ("step 2", 1)
    assert (OWN_LOGS.per_chunk, OWN_LOGS.chunks_per_log) == (2, 3)


def test_steps_that_share_a_log_take_what_is_done_next():
    assert {SHARED.log_of(position) for position in range(24)} == {"run"}
    entries = [SHARED.entries_of(step, chunk) for step in range(1, 4) for chunk in range(3)]
    assert entries == [("run", number) for number in range(SHARED.chunks_per_log)], "from the first step drawn here"


@pytest.mark.parametrize("version", [None, 0, 3])
def test_nothing_is_begun_beyond_the_stream(version):
    assert [OWN_LOGS.max_position(step, version) for step in range(4)] == [6, 12, 18, 24]
    assert [SHARED.max_position(step, version) for step in range(4)] == [10, 16, 22, 24]


def test_weights_have_to_be_fresh_enough_for_the_next_step_where_that_is_asked():
    rules = StreamRules(num_groups=24, per_step=6, num_ahead=6, max_staleness=1)
    assert [rules.max_position(2, version) for version in (None, 0, 1, 2, 3)] == [18, 18, 18, 24, 24]
    assert rules.max_position(0, 0) == 12
    assert rules.max_position(0, None) == 6, "weights that are incomplete are not of version 0"


@given(st.sets(st.integers(0, 30), max_size=20), st.data())
def test_a_run_takes_the_positions_that_are_open_and_the_first_ones_first(taken, data):
    """Some of those that are not open were dropped."""
    num_dropped = len(taken) % 4 + 4 * data.draw(st.integers(0, len(taken) // 4))
    done = Consumed().after(sorted(taken)[num_dropped:], sorted(taken)[:num_dropped])
    rules = StreamRules(num_groups=40, per_step=4, done=done)
    still_open = [position for position in range(100) if position not in taken]
    for step in range(rules.first_step, 10):
        begun = [position for position in still_open if position < rules.max_position(step, None)]
        assert begun == still_open[: (step + 1 - rules.first_step) * 4], "whatever was dropped before the run"
        assert {rules.log_of(position) for position in begun[-4:]} == {f"step {step}"}
        assert rules.max_position(step, None, num_dropped=2) == still_open[len(begun) + 2]
