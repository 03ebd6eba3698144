"""The weight sync on one rank: which parts come in which turn, and what it does where both sides differ."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rltrain.config.schema import WeightSync as WeightSyncConfig
from rltrain.errors import SyncMismatchError
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.delta import DeltaTurn, DeltaTurns
from rltrain.reshard.execute import SyncReport
from rltrain.roles.weight_sync import SyncedPart, WeightSyncTask

NUMBERS = dict.fromkeys(("bytes_local", "bytes_node", "bytes_network", "network_minimum", "bytes_sent"), 0)
REPORT = SyncReport(**NUMBERS, bytes_received=0, num_rounds=1, num_launches=1, peak_staging_bytes=0, copy_seconds=0,
                    pack_seconds=0, wire_seconds=0, unpack_seconds=0, seconds=1, bytes_compared=100, bytes_changed=3,
                    bytes_encoded=5)  # fmt: skip


class Part:
    """Notes in `log` what it is asked; the runs whose numbers are in `drifts` find a difference where they compare."""

    def __init__(self, log: list[Any], number: int, *, is_frozen: bool = False, drifts: tuple[int, ...] = ()) -> None:
        self.log, self.number, self.is_frozen, self.drifts = log, number, is_frozen, drifts
        self.num_runs = 0

    def run(self, source: object, destination: object, turn: DeltaTurn, *, compares: bool) -> tuple[SyncReport, float]:
        self.num_runs += 1
        self.log.append((self.number, turn.value, compares))
        if self.num_runs in self.drifts:
            raise SyncMismatchError("model.norm.weight differs on rank(s) 1")
        return REPORT, 0.25


class Engine:
    """Notes which parts come, and that those of changes alone hold what was there."""

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
    sync.base, sync.has_base = None, False
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
    assert log == [(part, "changes", True) for part in (0, 1)] * 2, "each is compared from then on"


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
    """checks.replicas. The weights of sync 3 are those that step 2 left, the third."""
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
    assert engine.came[-2:] == [(0, False), (1, False)], "a server that was started anew gets everything"


def test_an_engine_that_a_sync_did_not_reach_gets_everything_with_the_next() -> None:
    log: list[Any] = []
    sync = sync_of(Part(log, 0))
    for step in (0, 1):
        sync(step, 0)
    engine: Any = sync.engine
    engine.policy_version = 7  # it was given other weights meanwhile
    assert sync(2, 0)["perf/weight_sync_is_full"] == 1.0
    assert sync(3, 0)["perf/weight_sync_is_full"] == 0.0
