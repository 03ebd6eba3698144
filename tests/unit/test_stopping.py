"""Signals that ask a job to stop: all ranks stop at the same boundary, and nobody waits for ranks that are gone."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.runtime.ending import Ending
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import has_ended, this_machine, this_process
from rltrain.runtime.stopping import PAUSE, SAVES_KEPT, SIGNALS, StopRequest
from rltrain.runtime.world import World
from tests.unit.shared_store import open_store

NUM_RANKS = 2


def request_of(rank: int, store: dist.Store, saves: bool = True) -> StopRequest:
    """Of a rank that has published a beat."""
    own = store.clone()  # type: ignore[attr-defined]
    job_store = JobStore(World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), own, timeout_s=10))
    job_store.heartbeat.publish()
    return StopRequest(rank, own, job_store.observer, saves=saves, within_s=60, last_resort=lambda: "nothing is left")


@pytest.fixture
def store() -> Iterator[dist.Store]:
    with open_store() as store:
        yield store


@pytest.fixture
def requests(store: dist.Store) -> Iterator[list[StopRequest]]:
    """Of two ranks in this process, whose signals the first one listens to."""
    ranks = [request_of(rank, store) for rank in range(NUM_RANKS)]
    ranks[0].listen()
    yield ranks
    ranks[0].close()


def test_nobody_stops_without_a_signal(requests: list[StopRequest]) -> None:
    assert [request.verdict(step) for step in range(3) for request in requests] == [None] * 6


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_rank_at_a_boundary_decides_for_all(requests: list[StopRequest], number: signal.Signals) -> None:
    first, second = requests
    assert first.verdict(0) is None
    os.kill(os.getpid(), number)
    boundary = next(b for b in range(1, 1000) if second.verdict(b) or time.sleep(0.01))
    assert boundary > 0, "it is not there at once"
    assert [second.verdict(step) for step in range(boundary)] == [None] * boundary
    assert first.verdict(boundary) == second.verdict(boundary) == first.verdict(boundary + 1) == number.name


@given(moves=st.lists(st.tuples(st.sampled_from(("first", "second", "third")), st.booleans()), max_size=60))
def test_the_first_rank_at_a_boundary_decides_whether_all_save_as_it_is_time(moves: list[tuple[str, bool]]) -> None:
    """No rank is more than SAVES_KEPT saves behind."""
    store = dist.HashStore()
    ranks = {name: request_of(rank, store) for rank, name in enumerate(("first", "second", "third"))}
    come_to = dict.fromkeys(ranks, 0)
    expected: list[bool] = []
    for name, is_time in moves:
        boundary = come_to[name]
        if boundary == len(expected):
            is_time &= sum(expected[min(come_to.values()) :]) < SAVES_KEPT
            expected.append(is_time)
        assert ranks[name].verdict(boundary, is_time=is_time) is None
        assert ranks[name].saves_at(boundary) == expected[boundary]
        come_to[name] += 1
        saved = [number for number, saves in enumerate(expected) if saves]
        assert [*ranks["third"].saved_by_time()] == saved[-SAVES_KEPT:]


@given(moves=st.lists(st.sampled_from(("first", "second", "third", "stop")), max_size=60))
def test_ranks_that_are_far_apart_end_at_one_boundary_and_the_store_does_not_grow(moves: list[str]) -> None:
    store = dist.HashStore()
    ranks = {name: request_of(rank, store) for rank, name in enumerate(("first", "second", "third"))}
    verdicts: dict[str, list[str | None]] = {name: [] for name in ranks}
    ahead, expected, keys_before = 0, None, store.num_keys()
    for name in moves:
        if name == "stop":
            ranks["first"].pause("a reason")
            expected = ahead if expected is None else expected
        elif not verdicts[name][-1:] or verdicts[name][-1] is None:
            verdicts[name].append(ranks[name].verdict(len(verdicts[name])))
            ahead = max(ahead, len(verdicts[name]))
    for of_rank in verdicts.values():
        assert of_rank == [PAUSE + "a reason" if boundary == expected else None for boundary in range(len(of_rank))]
    assert store.num_keys() <= keys_before + 2, "the last boundary, and the request"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[tuple[str, int]]:
    """With which the process would have ended, and the exit statuses."""
    found: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def end(_: Ending, message: str, status: int) -> None:
        found.put((message, status))
        sys.exit()

    monkeypatch.setattr(Ending, "with_message", end)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ctrl_c_comes_twice_and_a_second_one_ends_the_job(
    requests: list[StopRequest], messages: queue.SimpleQueue[tuple[str, int]]
) -> None:
    """From the terminal and from torchrun, which sends SIGTERM at the second one."""
    first, second = requests
    assert first.verdict(0) is None
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    assert any(second.verdict(boundary) or time.sleep(0.01) for boundary in range(1, 1000))
    with pytest.raises(queue.Empty):
        messages.get(timeout=0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    message = "SIGINT: asked again, the job ends at once without a checkpoint; nothing is left"
    assert messages.get(timeout=20) == (message, 128 + signal.SIGINT)
    assert first.verdict(0) is None, "where it had been decided that the job goes on it does"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ctrl_c_ends_a_job_that_saves_nothing_with_one_line(
    store: dist.Store, messages: queue.SimpleQueue[tuple[str, int]]
) -> None:
    stop = request_of(0, store, saves=False)
    stop.listen()
    try:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        message = (
            "SIGINT: the job ends and saves nothing, as checkpoint.save_interval and checkpoint.save_every_s are 0"
        )
        assert messages.get(timeout=20) == (message, 128 + signal.SIGINT)
    finally:
        stop.close()


def test_signals_are_given_back(requests: list[StopRequest]) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    requests[0].close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    deadline = time.monotonic() + 20
    while any(thread.name == "stop request" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread ends as well, though a signal had come"


def test_it_is_seen_when_a_process_of_this_machine_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    name = f"{this_machine()} {process.pid}"
    assert not has_ended(name) and not has_ended(this_process())
    process.kill()
    time.sleep(0.1)
    assert has_ended(name), "nobody has waited for it yet"
    process.wait()
    assert has_ended(name)


def test_nothing_is_said_of_processes_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_ended("node9 pid:[1] 999999") and not has_ended("")
    monkeypatch.setattr("rltrain.runtime.machine.this_machine", lambda: "")
    assert not has_ended(" 999999")
