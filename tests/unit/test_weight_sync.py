"""Syncs of weights: their parts, joining in flight, and the models of each rank."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.config.models import Lora
from rltrain.config.schema import Config
from rltrain.config.schema import WeightSync as WeightSyncConfig
from rltrain.errors import SyncMismatchError
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.delta import DeltaTurn, DeltaTurns
from rltrain.reshard.execute import SyncReport
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.reference import uses_actor_modules
from rltrain.roles.role import Job
from rltrain.roles.weight_sync import RoleResharding, SyncedPart, WeightSyncTask, groups_of
from rltrain.rollout import in_flight_sync as in_flight
from rltrain.rollout.in_flight_sync import InFlightSync
from rltrain.runtime.grid import Grid
from tests.support.model_shards import tiny_architecture
from tests.support.shared_store import open_store

NUMBERS = dict.fromkeys(("bytes_local", "bytes_node", "bytes_network", "network_minimum", "bytes_sent"), 0)
REPORT = SyncReport(**NUMBERS, bytes_received=0, num_rounds=1, num_launches=1, peak_staging_bytes=0, copy_seconds=0,
                    pack_seconds=0, wire_seconds=0, unpack_seconds=0, seconds=1, bytes_compared=100, bytes_changed=3,
                    bytes_encoded=5)  # fmt: skip


class Part:
    """A part with a log of its calls. The runs numbered in `drifts` find a difference if they compare."""

    def __init__(
        self,
        log: list[Any],
        number: int,
        *,
        is_frozen: bool = False,
        drifts: tuple[int, ...] = (),
        bytes_node: int = 0,
    ) -> None:
        self.log, self.number, self.is_frozen, self.drifts = log, number, is_frozen, drifts
        self.report = replace(REPORT, bytes_node=bytes_node)
        self.num_runs = 0

    def run(self, source: object, destination: object, turn: DeltaTurn, *, compares: bool) -> tuple[SyncReport, float]:
        self.num_runs += 1
        self.log.append((self.number, turn.value, compares))
        if self.num_runs in self.drifts:
            raise SyncMismatchError("model.norm.weight differs on rank(s) 1")
        return self.report, 0.25


class Engine:
    """An engine with a record of its parts. The flag of a part means that it still holds the old weights."""

    def __init__(self) -> None:
        self.policy_version: int | None = None
        self.num_restarts = 0
        self.came: list[tuple[int, bool]] = []

    def begin_update(self) -> None:
        self.policy_version = None

    def incoming(self, part: int, *, is_kept: bool = False) -> dict[str, Any]:
        self.came.append((part, is_kept))
        return {}

    def arrived(self, part: int) -> None:
        pass

    def end_update(self, version: int) -> None:
        self.policy_version = version


def sync_of(*parts: Part, full_every: int | None = 50, compared_every: int = 0) -> WeightSyncTask:
    sync = WeightSyncTask.__new__(WeightSyncTask)
    sync.actor, sync.engine, sync.left = None, Engine(), None  # type: ignore[assignment]
    sync.weights = SimpleNamespace(times_emptied=0)  # type: ignore[assignment]
    sync.config, sync.turns = WeightSyncConfig(), DeltaTurns(full_every) if full_every else None
    sync.compared_every = compared_every
    sync.parts = [SyncedPart([part], "weights") for part in parts]  # type: ignore[list-item]
    sync.base, sync.has_base, sync.moved_bytes = None, False, {}
    sync.notices_losses = full_every is not None or any(part.is_frozen for part in parts)
    sync.agreement = Agreement(None, 0, None)
    return sync


def test_a_difference_is_answered_by_everything_and_said(caplog: pytest.LogCaptureFixture) -> None:
    log: list[Any] = []
    sync = sync_of(Part(log, 0), Part(log, 1, drifts=(2,)))
    assert sync(0, 0)["perf/weight_sync_is_full"] == 1.0
    log.clear()
    with caplog.at_level(logging.WARNING):
        assert sync(1, 0)["perf/weight_sync_is_full"] == 1.0
    assert log == [(0, "changes", True), (1, "changes", True), (0, "whole", True), (1, "whole", True)]
    [said] = caplog.messages
    assert "model.norm.weight differs" in said and "everything is sent now" in said
    assert sync.engine is not None and sync.engine.policy_version == 1
    log.clear()
    assert [sync(step, 0)["perf/weight_sync_is_full"] for step in (2, 3)] == [0.0, 0.0]
    assert log == [(part, "changes", True) for part in (0, 1)] * 2, "each sync is compared from then on"


def test_a_difference_behind_everything_ends_the_run() -> None:
    sync = sync_of(Part([], 0, drifts=(1,)))
    with pytest.raises(SyncMismatchError):
        sync(0, 0)
    sync = sync_of(Part([], 0, drifts=(2, 3)))
    sync(0, 0)
    with pytest.raises(SyncMismatchError):
        sync(1, 0)
    assert sync.engine is not None and sync.engine.policy_version is None


def test_engines_are_compared_with_the_weights_of_every_so_many_steps() -> None:
    """checks.replicas counts trained steps. Sync 3 brings the weights after step 2, the third step."""
    log: list[Any] = []
    sync = sync_of(Part(log, 0, drifts=(7,)), full_every=None, compared_every=3)
    compared = [step for step in range(6) if "perf/weight_sync_verify_s" in sync(step, 0)]
    assert compared == [0, 3] == [step for step, (_, _, compares) in enumerate(log) if compares]
    with pytest.raises(SyncMismatchError, match="differs on rank"):
        sync(6, 0)


def test_parts_that_never_change_come_once_and_to_be_compared() -> None:
    log: list[Any] = []
    sync = sync_of(Part(log, 0), Part(log, 1, is_frozen=True))
    engine: Any = sync.engine
    for step in range(4):
        sync(step, 0)
    assert engine.came == [(0, False), (1, False), (0, True), (1, True), (0, True), (0, True)]
    engine.num_restarts = 1
    sync(4, 0)
    assert engine.came[-2:] == [(0, False), (1, False)], "a restarted server gets everything"


def test_parts_that_never_change_come_once_also_without_deltas() -> None:
    log: list[Any] = []
    sync = sync_of(Part(log, 0, is_frozen=True, bytes_node=7), Part(log, 1), full_every=None, compared_every=3)
    engine: Any = sync.engine

    def sent(step: int) -> tuple[list[int], float]:
        log.clear()
        metrics = sync(step, 0)
        return [number for number, *_ in log], metrics["perf/weight_sync_kept_bytes"]

    assert sent(0) == ([0, 1], 0)
    assert sent(1) == ([1], 7)
    assert sent(3) == ([0, 1], 0), "it is compared"
    sync.weights.times_emptied += 1  # type: ignore[union-attr]
    assert sent(4) == ([0, 1], 0), "other roles had the engine's memory"
    assert sent(5) == ([1], 7)
    engine.num_restarts = 1
    assert sent(7) == ([0, 1], 0), "a restarted server has other weights"


def test_an_engine_that_a_sync_did_not_reach_gets_everything_with_the_next() -> None:
    sync = sync_of(Part([], 0))
    for step in (0, 1):
        sync(step, 0)
    engine: Any = sync.engine
    engine.policy_version = 7  # other weights came in between
    assert sync(2, 0)["perf/weight_sync_is_full"] == 1.0
    assert sync(3, 0)["perf/weight_sync_is_full"] == 0.0


ATTENTION = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "o_proj"), ("v_proj",)])
def test_what_adapters_touch_is_apart_from_what_never_changes(family: str, targets: tuple[str, ...] | None) -> None:
    architecture = tiny_architecture(family)
    config = SimpleNamespace(model=SimpleNamespace(lora=Lora(rank=2, targets=targets)))
    source = megatron_layout(architecture, Grid((0,)))
    found = groups_of(SimpleNamespace(config=config, architecture=architecture), source, 2000)  # type: ignore[arg-type]
    groups, frozen = ([group for group, is_frozen in found if is_frozen is wanted] for wanted in (False, True))
    names = np.array(source.tensors.names)
    assert len(groups) > 1 and (np.sum([*groups, *frozen], axis=0) == 1).all(), "each tensor is in exactly one group"
    adapted = {".".join(name.split(".")[-2:]) for name in names[np.any(groups, axis=0)]}
    if targets == ("v_proj",):
        assert adapted == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}, "they are one parameter in training"
    elif targets is not None:
        assert adapted == ATTENTION
    else:
        assert adapted == {*ATTENTION, "gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    [rest] = frozen
    assert "model.embed_tokens.weight" in names[rest] and "model.norm.weight" in names[rest]


def test_what_never_changes_is_sent_with_everything_alone_and_compared_with_the_rest() -> None:
    asked: list[Any] = []

    class Noting(RoleResharding):
        """A resharding with a record of its sent elements and of its comparisons."""

        def __init__(self, *, is_frozen: bool) -> None:
            self.config = SimpleNamespace(verify=False)  # type: ignore[assignment]
            self.is_frozen = is_frozen

        def _send(self, source: object, destination: object, turn: DeltaTurn) -> None:
            asked.append(("frozen" if self.is_frozen else "adapted", turn))

        def verify(self, source: object, destination: object) -> float:
            asked.append(("frozen" if self.is_frozen else "adapted", "compared"))
            return 0.25

    adapted, frozen, compared = (("adapted", DeltaTurn.WHOLE), ("frozen", DeltaTurn.WHOLE), "compared")
    changes = ("adapted", DeltaTurn.CHANGES)
    for turn, compares, expected in (
        (DeltaTurn.WHOLE, False, [adapted, frozen]),
        (DeltaTurn.CHANGES, False, [changes]),
        (DeltaTurn.CHANGES, True, [changes, ("adapted", compared), ("frozen", compared)]),
    ):
        asked.clear()
        seconds = [Noting(is_frozen=is_frozen).run(None, {}, turn, compares=compares)[1] for is_frozen in (False, True)]
        assert asked == expected and sum(seconds) == (0.5 if compares else 0)


SYNCS = [(0, 0), (10, 4), (20, 4), (30, 25)]
"""Positions of syncs, each with the first position for joining it."""


@pytest.fixture(autouse=True)
def poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "poll_s", lambda num_looking: 0.0)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


class Rank:
    """A rank with the positions of its joined syncs."""

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
    assert leader.joined == follower.joined == [0], "followers join with their leader"


def test_several_syncs_are_joined_one_after_the_other_within_one_task(actor, leader):
    """The actor continues with existing samples, however long the engine works on the present ones."""
    leader.sync.position = 5
    for _ in range(3):
        actor.announce()
        leader.sync.join_if_due()
    assert leader.joined == [0, 10, 20]


@pytest.mark.parametrize(
    ("may_join", "positions"),
    [(lambda position, sync: True, (0, 3, 4)), (lambda position, sync: not position < 3 <= sync, (2, 3, 4))],
    ids=["its earliest position", "a rank that may not join yet"],
)
def test_no_sync_is_joined_before(may_join, positions, actor, leader):
    leader.sync.may_join = may_join
    for _ in range(2):
        actor.announce()
    for position, joined in zip(positions, ([0], [0], [0, 10]), strict=True):
        leader.sync.position = position
        leader.sync.join_if_due()
        assert leader.joined == joined


def test_a_sync_not_joined_before_is_joined_at_its_place(leader):
    """At this place the engine waits for the actor, whether the sync is announced or not."""
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
    assert not leader.sync.is_due(), "the last request is too recent"


class TestEnteringAGenerateTask:
    """Entering a task: the leader decides for all ranks of its engine. Before it enters, a follower joins the same
    syncs."""

    def test_the_leader_enters_once_all_have_come_and_the_others_after_it(self, leader, follower):
        leader.sync.come()
        assert not leader.sync.enter_first()
        follower.sync.come()
        assert not follower.sync.leader_has_entered()
        assert leader.sync.enter_first() and follower.sync.leader_has_entered()
        follower.sync.come()
        assert not follower.sync.leader_has_entered(), "the leader has entered only the previous task"

    def test_a_follower_elsewhere_joins_what_its_leader_joins_at_the_door(self, actor, leader, follower):
        """The follower may wait elsewhere for a rank in this sync. Its leader must not wait for it inside the task."""
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
        """Otherwise the follower would join twice: before the task, and inside it."""
        follower.sync.come()
        leader.sync.come()
        assert leader.sync.enter_first()
        actor.announce()
        leader.sync.join_if_due()
        follower.sync.join_before_leader_enters()
        assert follower.joined == []
        assert follower.sync.leader_has_entered()


ROLES = ("actor", "reference", "rollout")
GRID = Grid((0,))


def job_on(device, **sections):
    values = {
        "steps": 1,
        "placement": {"actor, reference, rollout, reward": 0},
        "model": {"path": "m"},
        "data": {"train": {"path": "t"}},
    }
    return Job(
        config=Config.model_validate(values | sections),
        world=SimpleNamespace(device=torch.device(device)),
        placement=None,
        grids=dict.fromkeys(ROLES, GRID),
        groups=None,
        architectures=dict.fromkeys(ROLES, "the same"),
        job_store=None,
        waiter=None,
        rows=None,
        pause=None,
    )


@pytest.mark.parametrize(("device", "auto"), [("cuda", "auto"), ("cpu", False)])
def test_auto_is_no_where_the_device_is_the_host(device, auto):
    job = job_on(device, actor={"offload": "auto"}, reference={"offload": True}, rollout={"offload": False})
    assert [job.offload_of(role) for role in ROLES] == [auto, True, False]


@pytest.mark.parametrize(
    ("device", "offload", "shares"),
    [("cuda", "auto", True), ("cuda", False, True), ("cpu", "auto", False), ("cpu", False, False), ("cpu", True, True)],
)
def test_a_reference_takes_the_actors_modules_where_that_saves_memory(device, offload, shares):
    assert uses_actor_modules(job_on(device, reference={"offload": offload})) == shares
