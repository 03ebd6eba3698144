"""When ranks of an engine join a weight sync: due, not too early, all of them, and each sync once."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rltrain.rollout import in_flight_sync as in_flight
from rltrain.rollout.in_flight_sync import InFlightSync
from tests.unit.shared_store import open_store

SYNCS = [(0, 0), (10, 4), (20, 4), (30, 25)]
"""Positions, and from where on each may be joined."""


@pytest.fixture(autouse=True)
def poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "poll_s", lambda num_looking: 0.0)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


class Rank:
    """A rank with the positions at which it has joined syncs."""

    def __init__(self, store: dist.Store, rank: int, leader: int) -> None:
        self.joined: list[int] = []
        followers = (2,) if leader == 1 else ()
        run = self.joined.append
        self.sync = InFlightSync(SYNCS, store, leader=leader, followers=followers, rank=rank, run=run)


@pytest.fixture
def actor(store: dist.TCPStore) -> InFlightSync:
    return Rank(store, rank=0, leader=0).sync


@pytest.fixture
def leader(store: dist.TCPStore) -> Rank:
    return Rank(store, rank=1, leader=1)


@pytest.fixture
def follower(store: dist.TCPStore) -> Rank:
    return Rank(store, rank=2, leader=1)


def test_a_sync_is_due_once_the_actor_has_come_to_it(actor, leader):
    leader.sync.join_if_due()
    assert leader.joined == []
    actor.announce()
    leader.sync.join_if_due()
    leader.sync.join_if_due()
    assert leader.joined == [0]


def test_a_sync_that_an_engine_has_no_room_for_waits_until_its_place(actor, leader, follower):
    leader.sync.has_room = lambda: False
    follower.sync.has_room = lambda: False
    actor.announce()
    leader.sync.join_if_due()
    assert leader.joined == []
    leader.sync.reach(0)
    follower.sync.join_if_due()
    assert leader.joined == follower.joined == [0], "the others follow the leader"


def test_several_syncs_are_joined_one_after_the_other_within_one_task(actor, leader):
    """The actor goes on with samples that it has, however long the engine takes over the present ones."""
    leader.sync.position = 5
    for _ in range(3):
        actor.announce()
        leader.sync.join_if_due()
    assert leader.joined == [0, 10, 20]


def test_no_sync_is_joined_before_its_earliest_position(actor, leader):
    for _ in range(2):
        actor.announce()
    for position, joined in [(0, [0]), (3, [0]), (4, [0, 10])]:
        leader.sync.position = position
        leader.sync.join_if_due()
        assert leader.joined == joined


def test_a_sync_that_a_rank_may_not_join_yet_waits(actor, leader):
    saved_at = 3
    leader.sync.may_join = lambda position, sync: not position < saved_at <= sync
    for _ in range(2):
        actor.announce()
    for position, joined in [(2, [0]), (3, [0]), (4, [0, 10])]:
        leader.sync.position = position
        leader.sync.join_if_due()
        assert leader.joined == joined


def test_a_sync_not_joined_before_is_joined_at_its_place(leader):
    """There the engine waits for the actor, announced or not."""
    for position in (0, 10, 20):
        leader.sync.position = position
        leader.sync.reach(position)
    assert leader.joined == [0, 10, 20]


def test_a_sync_joined_before_is_passed_by_at_its_place(actor, leader):
    for _ in range(3):
        actor.announce()
    leader.sync.position = 4
    for _ in range(3):
        leader.sync.join_if_due()
    for position in (0, 10, 20):
        leader.sync.reach(position)
    assert leader.joined == [0, 10, 20]
    leader.sync.reach(30)
    assert leader.joined == [0, 10, 20, 30]


def test_after_the_last_sync_none_is_due(actor, leader):
    for position, _ in SYNCS:
        actor.announce()
        leader.sync.position = position
        leader.sync.reach(position)
    actor.announce()
    leader.sync.join_if_due()
    assert leader.joined == [position for position, _ in SYNCS]


def test_a_follower_joins_after_its_leader_and_not_by_the_actors_word(actor, leader, follower):
    actor.announce()
    follower.sync.join_if_due()
    assert follower.joined == []
    leader.sync.join_if_due()
    follower.sync.join_if_due()
    follower.sync.join_if_due()
    assert follower.joined == leader.joined == [0]


def test_engines_decide_for_themselves(store, actor, leader):
    other = Rank(store, rank=3, leader=3)
    actor.announce()
    leader.sync.join_if_due()
    assert (leader.joined, other.joined) == ([0], [])
    other.sync.join_if_due()
    assert other.joined == [0]


def test_the_store_is_asked_every_few_milliseconds_at_most(monkeypatch, actor, store):
    monkeypatch.setattr(in_flight, "poll_s", lambda num_looking: 60.0 * num_looking)
    leader = Rank(store, rank=1, leader=1)
    assert not leader.sync.is_due()
    actor.announce()
    assert not leader.sync.is_due(), "asked a moment ago"


class TestEnteringAGenerateTask:
    """There the leader decides for all ranks of its engine; until it enters, a follower joins what it joins."""

    def test_the_leader_enters_once_all_have_come_and_the_others_after_it(self, leader, follower):
        leader.sync.come()
        assert not leader.sync.enter_first()
        follower.sync.come()
        assert not follower.sync.leader_has_entered()
        assert leader.sync.enter_first() and follower.sync.leader_has_entered()
        follower.sync.come()
        assert not follower.sync.leader_has_entered(), "that was the task before"

    def test_a_follower_elsewhere_joins_what_its_leader_joins_at_the_door(self, actor, leader, follower):
        """It may wait there for a rank that has joined that sync: its leader must not wait for it inside the task."""
        leader.sync.come()
        actor.announce()
        assert not leader.sync.enter_first()
        leader.sync.join_if_due()
        follower.sync.join_if_due()
        assert leader.joined == follower.joined == [0]
        follower.sync.come()
        assert leader.sync.enter_first()
        follower.sync.join_before_leader_enters()
        assert follower.joined == [0]

    def test_a_follower_that_waits_joins_what_its_leader_joins_on_the_way(self, actor, leader, follower):
        follower.sync.come()
        actor.announce()
        leader.sync.join_if_due()
        follower.sync.join_before_leader_enters()
        assert follower.joined == [0]

    def test_what_the_leader_joins_inside_the_task_the_follower_is_told_there(self, actor, leader, follower):
        """It would join twice otherwise: before, and when it gets to hear of it in the task."""
        follower.sync.come()
        leader.sync.come()
        assert leader.sync.enter_first()
        actor.announce()
        leader.sync.join_if_due()
        follower.sync.join_before_leader_enters()
        assert follower.joined == []
        assert follower.sync.leader_has_entered()
