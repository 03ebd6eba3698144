"""No thread of ours ends by an error in silence, whatever the error is."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import JobThread, end_job_by_threads
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import World
from tests.unit.shared_store import open_store

LIMIT_S = 20.0

Ends = queue.SimpleQueue[tuple[str, BaseException]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Threads by which the job would have ended, and their errors."""
    monkeypatch.setattr(threading, "excepthook", None)
    found: Ends = queue.SimpleQueue()
    end_job_by_threads(lambda name, error: found.put((name, error)))
    return found


@pytest.fixture
def job_store() -> Iterator[JobStore]:
    with open_store() as store:
        job_store = JobStore(World(0, 1, 0, 1, torch.device("cpu"), store, timeout_s=10))
        job_store.heartbeat.interval_s = 0.01
        yield job_store


@pytest.mark.parametrize("error", [TypeError("no line"), RuntimeError("changed size"), SystemExit(1)], ids=repr)
def test_a_thread_ends_the_job_by_whatever_it_raises(ends: Ends, error: BaseException) -> None:
    def fail() -> None:
        raise error

    JobThread(target=fail, name="courier").start()
    assert ends.get(timeout=LIMIT_S) == ("courier", error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_librarys_thread_ends_nothing(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=lambda: {}["key"])
    thread.start()
    thread.join()
    assert ends.empty() and "KeyError: 'key'" in capfd.readouterr().err


@pytest.mark.parametrize("error", [TypeError, RuntimeError, dist.DistNetworkError])
def test_a_heartbeat_that_stops_ends_the_job(job_store: JobStore, ends: Ends, error: type[Exception]) -> None:
    """Else the others would take the rank for one that has stopped, and end the job as stalled."""
    job_store.heartbeat.start()

    def fail() -> dict[str, int]:
        raise error("no beat")

    job_store.heartbeat.sequences = fail
    name, raised = ends.get(timeout=LIMIT_S)
    assert name == "heartbeat" and type(raised) is error


@pytest.mark.parametrize("error", [TypeError, RuntimeError, dist.DistNetworkError])
def test_a_watchdog_that_stops_ends_the_job(
    job_store: JobStore, ends: Ends, tmp_path: Path, error: type[Exception]
) -> None:
    watchdog = Watchdog(job_store.heartbeat, job_store.observer, job_store.world.store, tmp_path, interval_s=0.01)

    def fail() -> float:
        raise error("no look")

    watchdog.observer.clock = fail
    watchdog.start()
    name, raised = ends.get(timeout=LIMIT_S)
    assert name == "watchdog" and type(raised) is error
