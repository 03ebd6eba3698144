"""Whoever has the job's store leaves last; ranks that a signal has stopped stay until their launcher knows of it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.runtime import stopping
from rltrain.runtime.ending import Ending
from rltrain.runtime.heartbeat import Beat
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import process_here
from rltrain.runtime.stopping import StopRequest, await_signal_of_launcher, leave_store
from rltrain.runtime.world import World
from tests.unit.shared_store import Jobs, open_store

NUM_RANKS = 3
LATE_S = 0.3


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NUM_RANKS)


def job_store_of(rank: int, store: dist.Store) -> JobStore:
    world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, 10, has_store_in_rank_0=True)
    return JobStore(world)


def ends(jobs: Jobs, *, never: int | None = None) -> list[float]:
    """When rank 0 has left, and each of the others comes to its end, the last one late; `never` does not leave."""

    def body(rank: int, store: dist.Store) -> float:
        job_store = job_store_of(rank, store)
        time.sleep(LATE_S if rank == NUM_RANKS - 1 else 0)
        job_store.heartbeat.finish()
        at_its_end = time.monotonic()
        if rank != never:
            leave_store(job_store, Ending(job_store.world.background, rank, NUM_RANKS))
        return at_its_end if rank else time.monotonic()

    return jobs.run(body, NUM_RANKS)


def test_rank_0_leaves_after_all_others_where_it_has_the_store(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late they come to their end."""
    monkeypatch.setattr(stopping, "LEAVES_WITHIN_S", LATE_S / 10)
    first, early, late = ends(jobs)
    assert first > late > early


def test_it_does_not_wait_for_ever_for_one_that_is_done(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(stopping, "LEAVES_WITHIN_S", 0.2)
    ends(jobs, never=1)
    assert "1 ranks that are done have not left" in caplog.text


@pytest.mark.parametrize("lost", [True, False])
def test_it_ends_with_a_job_that_fails(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Because another rank says so, or is lost without a word, as its node is."""

    def end(ending: Ending, error: object = None) -> None:
        raise SystemExit(str(error))

    monkeypatch.setattr(Ending, "by", end)
    monkeypatch.setattr(Ending, "follow", end)
    first, other = map(job_store_of, range(2), jobs.start(2))
    if lost:
        with subprocess.Popen(["true"]) as process:
            process.wait()
        other.heartbeat.board.put(Beat(1, task="update", process=process_here(process.pid)))
    else:
        other.world.background.set("failure", "{}")
    with pytest.raises(SystemExit, match=r"ranks \[1\] were lost" if lost else "None"):
        leave_store(first, Ending(first.world.background, 0, NUM_RANKS))


def test_a_rank_of_several_nodes_stays_until_it_gets_the_signal_that_has_stopped_the_job(jobs: Jobs) -> None:
    (store,) = jobs.start(1)
    job_store = job_store_of(0, store)
    job_store.heartbeat.publish()
    stop = StopRequest(0, store, job_store.observer, saves=True, within_s=60, last_resort=lambda: "", looks_at=[])
    stop.listen()
    begin = time.monotonic()
    await_signal_of_launcher(stop, job_store.world, "SIGTERM")  # on one node
    await_signal_of_launcher(stop, replace(job_store.world, num_nodes=2), "SIGINT")  # which agents do not send
    assert not stop.heard.is_set()
    noticed: Any = SimpleNamespace(num_nodes=2)
    os.kill(os.getpid(), signal.SIGTERM)
    await_signal_of_launcher(stop, noticed, "SIGTERM")
    stop.close()
    assert stop.heard.is_set() and time.monotonic() - begin < stopping.NOTICED_WITHIN_S
