"""Which engine draws which group: every one exactly once, fixed beforehand or taken by who has room."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.generation_loop import SharedAssignment, StaticAssignment
from tests.unit.shared_store import on_ranks, open_store


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


@given(st.integers(1, 5), st.integers(0, 20), st.lists(st.integers(0, 7), max_size=6))
def test_a_fixed_deal_gives_every_position_to_one_engine_whatever_its_speed(num_engines, start, growth):
    max_position = start
    assignments = [StaticAssignment(engine, num_engines, start) for engine in range(num_engines)]
    dealt: list[int] = []
    for more in growth:
        max_position += more
        for engine, assignment in enumerate(assignments):
            claimed = assignment.claim(room=0, max_position=max_position)
            assert all(position % num_engines == engine for position in claimed)
            dealt += claimed
    assert sorted(dealt) == list(range(start, max_position))


def test_a_shared_deal_goes_to_who_has_room(store):
    fast, slow = SharedAssignment(store), SharedAssignment(store)
    assert slow.claim(room=1, max_position=10) == [0]
    assert fast.claim(room=3, max_position=10) == [1, 2, 3]
    assert slow.claim(room=0, max_position=10) == []
    assert fast.claim(room=2, max_position=10) == [4, 5]


def test_a_position_beyond_the_horizon_is_held_until_the_horizon_has_moved(store):
    assignment, other = SharedAssignment(store), SharedAssignment(store)
    assert assignment.claim(room=5, max_position=2) == [0, 1]
    assert assignment.held == [2]
    assert assignment.claim(room=5, max_position=2) == []
    assert other.claim(room=5, max_position=2) == []
    assert (assignment.held, other.held) == ([2], [3]), "asking again takes no further one"
    assert other.claim(room=1, max_position=4) == [3]
    assert assignment.claim(room=2, max_position=5) == [2, 4]


def test_what_is_held_keeps_until_there_is_room(store):
    assignment = SharedAssignment(store)
    assert assignment.claim(room=1, max_position=0) == []
    assert assignment.claim(room=0, max_position=5) == []
    assert assignment.claim(room=1, max_position=5) == [0]


def test_a_resumed_run_goes_on_from_its_first_position(store):
    assert SharedAssignment(store, start=40).claim(room=2, max_position=42) == [40, 41]
    assert StaticAssignment(1, 2, start=40).claim(room=0, max_position=44) == [41, 43]


def test_engines_of_unequal_speed_share_all_positions_out(store):
    """Over several horizons, with room of one group at a time; while the slow engine has one the others do three."""
    num_engines, per_step, num_steps = 3, 12, 4

    def engine(rank: int, own: dist.Store) -> list[list[int]]:
        assignment, claimed = SharedAssignment(own), []
        done = dist.PrefixStore("done", own)
        for step in range(num_steps):
            claimed.append([])
            while done.add(f"step {step}", 0) < per_step:
                positions = assignment.claim(1, max_position=(step + 1) * per_step)
                claimed[-1] += positions
                others_did = done.add(f"step {step}", len(positions)) + 3
                while rank == 0 and done.add(f"step {step}", 0) < min(others_did, per_step):
                    time.sleep(1e-3)
        return claimed

    by_engine = on_ranks(store, engine, num_engines)
    for step in range(num_steps):
        dealt = Counter(position for claimed in by_engine for position in claimed[step])
        assert dealt == Counter(range(step * per_step, (step + 1) * per_step))
    slow, *fast = (sum(map(len, claimed)) for claimed in by_engine)
    assert 3 * slow <= sum(fast), "fast ones take more"
