"""The control code of more ranks asks no more per rank of the store, and sends no more to each other rank."""

from pathlib import Path
from types import ModuleType

import pytest

from rltrain.runtime.job_store import GATHERED_FROM

BENCHMARKS = Path(__file__).resolve().parents[2] / "tools/benchmarks"
SIZES = (64, 256)
CALLS = {"meet in the store": 6, "agree": 8, "heartbeats": 4, "join in flight": 3, "save": 4}
"""Of a rank, in the mean, at most; those of heartbeats per second."""
MOST_CONNECTIONS = 4


@pytest.fixture
def control_plane(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import control_plane

    return control_plane


def test_nothing_grows_as_ranks_squared(control_plane: ModuleType, tmp_path: Path) -> None:
    jobs = [control_plane.JobAtSize(size, tmp_path / str(size)) for size in SIZES]
    growth = SIZES[1] / SIZES[0]
    for phase, most_calls in CALLS.items():
        small, large = (control_plane.PHASES[phase](job) for job in jobs)
        assert large.store_calls <= most_calls, (phase, large)
        assert large.all_store_bytes <= 1.3 * growth * small.all_store_bytes or phase == "meet in the store", phase
    exchanged, met = ([control_plane.PHASES[phase](job) for job in jobs] for phase in ("exchange", "meet for a sync"))
    for small, large in (exchanged, met):
        assert large.message_bytes <= growth * small.message_bytes, "of the rank that sends most"
    for job, cost in zip(jobs, exchanged, strict=True):
        owners, replicas = job.grids["rollout"].dp, job.grids["actor"].dp
        num_groups = job.config.batch.prompts_per_step
        assert cost.messages <= num_groups // owners + 1, "to one rank of each replica that a group goes to, or is told"
        assert cost.passed_on == control_plane.RANKS_PER_NODE - 1
        assert cost.received <= 2 * num_groups // replicas and cost.least_received == 1
    assert all(control_plane.connect(job).communicators <= MOST_CONNECTIONS for job in jobs)


def test_a_first_rank_that_does_not_run_is_missed_by_few(control_plane: ModuleType, tmp_path: Path) -> None:
    """Those that look for the next one to judge are the lowest, and read as many beats as there are of these."""
    job = control_plane.JobAtSize(SIZES[1], tmp_path)
    for store in job.job_stores[1:]:
        store.heartbeat.publish()
    second = 0
    for watchdog in job.watchdogs:
        watchdog.observer.clock = lambda: float(second)
    judging = []
    for second in range(40):  # noqa: B007 - the clock reads it
        for rank in (1, 2, 65):
            job.job_stores[rank].heartbeat.publish()
        judging = [rank for rank in (1, 2, 65) if job.watchdogs[rank]._judges()]
    assert judging == [1]
    job.shared.take()
    job.watchdogs[-1]._judges()
    assert sum(traffic.num_operations for traffic in job.shared.take().values()) <= 4


def test_in_a_large_job_the_first_rank_of_a_node_speaks_for_all(control_plane: ModuleType, tmp_path: Path) -> None:
    assert control_plane.PHASES["heartbeats"](control_plane.JobAtSize(GATHERED_FROM, tmp_path)).store_calls < 1
