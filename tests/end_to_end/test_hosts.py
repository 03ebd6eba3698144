"""A job over two hosts: network namespaces with their own addresses.

It gives the results of one host, even over a slow cable. After a fault it ends within `timeouts.lost_s` or continues,
and each side reports its knowledge once.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_job import Fault, HostJob, small_job
from tests.support.hosts import Hosts, obstacle
from tests.support.jobs import read_records, reported, train

pytestmark = pytest.mark.slow

LOST_S = 10
"""Seconds. On a busy machine no rank may run for several seconds."""
CLEAN_UP_S = 60
"""Seconds for messages, stacks, and torchrun, on a busy machine too."""
LIMITS = f"timeouts={{no_progress_s: 60, lost_s: {LOST_S}}}"
STEPS = "steps=5"
MODEL_MBIT = 2.5
"""Megabits that the engine's host receives in a weight sync, at least."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := obstacle():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(quickstart_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the same job on one host."""
    folder = tmp_path_factory.mktemp("alone")
    config, *overrides = small_job(folder, quickstart_files, 2, STEPS)
    train(config.removeprefix("--config="), *overrides, num_ranks=2)
    return folder


@pytest.fixture
def job(hosts: Hosts, quickstart_files: Path, tmp_path: Path) -> Iterator[Any]:
    """Returns a function (faults, restarts) -> the ended job."""
    jobs = []

    def run(faults: Sequence[Fault] = (), restarts: int = 0, limit_s: float = LOST_S + CLEAN_UP_S) -> HostJob:
        folder = tmp_path / "job"
        jobs.append(HostJob(hosts, folder, small_job(folder, quickstart_files, 2, STEPS, LIMITS), faults, restarts))
        jobs[0].run(limit_s)
        outputs = "\n".join(jobs[0].output(number) for number in hosts.numbers)
        assert len(jobs[0].happened) == len(faults) and not jobs[0].left() and len(jobs[0].ended) == 2, outputs
        return jobs[0]

    yield run
    for started in jobs:
        started.close()


def is_equal(job: HostJob, alone: Path) -> bool:
    return reported(job.folder / "run") == reported(alone / "run")


def test_over_a_slow_cable_two_hosts_compute_what_one_does(hosts: Hosts, job: Any, alone: Path) -> None:
    rate = 2.0
    hosts.limit(2, rate)
    try:
        ended = job(limit_s=240)
    finally:
        hosts.unlimit(2)
    assert ended.statuses == [0, 0] and is_equal(ended, alone)
    records = read_records(ended.folder / "run")
    syncs_s = [r["perf/weight_sync_s"] + r["perf/weight_sync_wait_s"] for r in records if "perf/weight_sync_s" in r]
    assert syncs_s and min(syncs_s) > MODEL_MBIT / rate, syncs_s


AT_SYNC = {"moment": "weight_sync", "step": 3, "rank": 1, "held": True}
AT_START = {"moment": "connect", "step": 0, "rank": 1, "held": True}


@pytest.mark.parametrize("moment, does", [(AT_SYNC, r"\w+\[\d\] \(.*\)"), (AT_START, "(starting|reading data.train)")])
def test_hosts_that_are_cut_apart_end_each_with_its_message(job: Any, moment: Fault, does: str) -> None:
    """The first host knows the last heartbeat. It may be a step old."""
    ended = job([{**moment, "kind": "cut", "host": 2}])
    assert 0 not in ended.statuses
    (first,), (second,) = ended.messages(1), ended.messages(2)
    assert re.match(f"rank 1 on n2 was last known to be at .+, .* timeouts.lost_s is {LOST_S} s", first), first
    assert re.match(f"rank 1 on n2 is at {does}.*: the job's store on n1 has not answered for timeouts.lost_s", second)


def test_where_torchrun_is_killed_its_rank_ends_the_job(job: Any) -> None:
    ended = job([{**AT_SYNC, "kind": "kill agent", "host": 2, "for_good": True}])
    assert ended.statuses == [1, -9]
    assert not ended.messages(1)
    (message,) = ended.messages(2)
    assert re.match(r"rank 1 on n2 is at \w+\[\d\] \(.*\): its torchrun was killed", message), message


def test_with_restarts_it_goes_on_after_a_kill_and_a_cut(job: Any, alone: Path) -> None:
    killed = {"moment": "update", "step": 2, "rank": 0, "held": True, "kind": "kill"}
    cut = {"moment": "generate", "step": 4, "rank": 1, "held": True, "kind": "cut", "heals_s": LOST_S + 5}
    ended = job([killed, cut], restarts=5, limit_s=240)
    assert ended.statuses == [0, 0] and is_equal(ended, alone)
