"""Tests of the end of a job: failures, signals, the boundary of a stop, the last rank to leave."""

import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rltrain.errors import FAILED, USER_ERROR, ConfigError
from rltrain.runtime import ending, stopping, whole_files
from rltrain.runtime.ending import Ending
from rltrain.runtime.heartbeat import Beat, Board
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import has_ended, process_here, this_machine, this_process
from rltrain.runtime.stopping import PAUSE, SAVES_KEPT, SIGNALS, StopRequest, await_signal_of_launcher, leave_store
from rltrain.runtime.world import World
from tests.forked.popen import PYTHON_PATH
from tests.support.shared_store import Jobs, open_store

NUM_RANKS = 3
LIMIT_S = 20.0


class Ended(BaseException):
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Returns the events in their order. The ranks' processes are simulated by threads and end by Ended."""
    events: list[str] = []

    def exit_by_raising(status: int) -> None:
        events.append(f"{threading.current_thread().name} ends with {status}")
        raise Ended(status)

    def close_mouth() -> None:
        events.append(f"{threading.current_thread().name} is quiet")

    monkeypatch.setattr(ending, "_exit", exit_by_raising)
    monkeypatch.setattr(ending, "_discard_output", close_mouth)
    monkeypatch.setattr(ending, "_this_thread_ends_the_process", lambda: None)
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return events


@pytest.fixture
def store() -> Iterator[dist.Store]:
    with open_store() as store:
        yield store


@pytest.fixture
def ranks(store: dist.Store, said: list[str]) -> list[Ending]:
    return [Ending(store.clone(), rank, NUM_RANKS) for rank in range(NUM_RANKS)]  # type: ignore[attr-defined]


def status_of(end: Callable[[], object]) -> int:
    with pytest.raises(Ended) as ended:
        end()
    return ended.value.status


def summary_of(path: Path, status: int) -> str:
    """Returns torchrun's last output for a rank with the error file `path`."""
    return str(ChildFailedError("train.py", {0: ProcessFailure(0, 1234, status, str(path))}))


def test_the_first_to_fail_has_the_message_and_the_others_end_well(
    ranks: list[Ending], capsys: pytest.CaptureFixture[str]
) -> None:
    """The later failures are only effects of the first rank's end."""
    error = ConfigError("steps: got many; expected a number")
    error.add_note("on rank 0")
    assert status_of(lambda: ranks[0].by(error)) == USER_ERROR
    assert capsys.readouterr().err == "\nrltrain: steps: got many; expected a number\n  on rank 0\n"
    assert status_of(lambda: ranks[1].by(RuntimeError("Connection closed by peer"))) == 0
    assert ranks[2].has_begun and status_of(ranks[2].follow) == 0
    assert capsys.readouterr().err == ""


def test_torchruns_summary_ends_with_the_message(ranks: list[Ending], tmp_path: Path) -> None:
    status_of(lambda: ranks[0].by(ConfigError("steps: got many; expected a number")))
    *_, last, border = summary_of(tmp_path / "error.json", USER_ERROR).splitlines()
    assert last == "  traceback : steps: got many; expected a number" and set(border) == {"="}


def test_torchrun_finds_no_half_of_a_message(
    ranks: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun reads the error file of a rank even if it kills the rank in the middle of writing."""

    def is_killed_amid(path: Path) -> None:
        path.write_text(path.read_text()[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_files, "flush", is_killed_amid)
    with pytest.raises(KeyboardInterrupt):
        ranks[0].by(ConfigError("no"))
    assert not (tmp_path / "error.json").exists()


def test_of_an_error_that_nobody_expected_the_summary_has_the_last_line(
    ranks: list[Ending], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError) as failure:
        {}["key"]
    assert status_of(lambda: ranks[2].by(failure.value, thread="heartbeat")) == FAILED
    printed = capsys.readouterr().err
    assert printed.startswith("\nrltrain: rank 2, thread 'heartbeat', failed:\nTraceback") and "test_ending" in printed
    summary = summary_of(tmp_path / "error.json", FAILED)
    assert "rank 2, thread 'heartbeat', failed: KeyError: 'key'" in summary and "test_ending" not in summary


def test_whoever_has_the_message_stays_until_the_others_are_quiet(
    ranks: list[Ending], store: dist.Store, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken connection makes the transports of running ranks print. Ranks that have not begun or are finished have
    no connection."""
    monkeypatch.setattr(ending, "QUIET_GRACE_S", LIMIT_S)
    Board(store).put(Beat(1, "generate", alive=1, process=this_process()))
    Board(store).put(Beat(2, "finished", alive=9, finished=True))
    refused = threading.Thread(target=status_of, args=(lambda: ranks[0].by(ConfigError("no")),), name="first")
    refused.start()
    assert ending.wait_briefly(store, [ending.PRINTED], LIMIT_S)
    threads = [threading.Thread(target=status_of, args=(ranks[1].follow,), name="other"), refused]
    threads[0].start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert said.index("first is quiet") < said.index("other is quiet") < said.index("first ends with 2")


def test_a_killed_rank_is_named_before_what_others_saw_of_it(
    ranks: list[Ending], store: dist.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    Board(store).put(Beat(1, "generate", "rollout", step=3, alive=4, process=process_here(gone.pid)))
    ranks[0].way_on = lambda: "the same command goes on from step 2"
    status_of(lambda: ranks[0].by(RuntimeError("Connection closed by peer")))
    lost = (
        "killed (for example for lack of memory) or crashed without a message: "
        f"rank 1 on {platform.node()}, last known to be at generate[3] (rollout); the same command goes on from step 2"
    )
    assert f"rltrain: {lost}. The error on rank 0:\nrank 0 failed:\nRuntimeError: Conn" in capsys.readouterr().err
    assert summary_of(tmp_path / "error.json", FAILED).splitlines()[-2] == f"  traceback : {lost}"


@pytest.mark.parametrize("broken", [True, False])
def test_where_a_connection_breaks_a_rank_of_another_machine_that_is_silent_is_named(
    broken: bool, ranks: list[Ending], store: dist.Store, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(ending, "HEARD_OF_WITHIN_S", 1.0)
    beat = Beat(1, "generate", "rollout", step=3, alive=4, process="n2 pid:[1] 7")
    silent, running = Board(store), Board(store.clone())  # type: ignore[attr-defined]
    silent.put(beat)
    running.put(replace(beat, rank=2, alive=5))
    beats_again = threading.Timer(0.3, running.put, [replace(beat, rank=2, alive=6)])
    beats_again.start()
    status_of(lambda: ranks[0].by(RuntimeError("Connection reset by peer" if broken else "out of memory")))
    beats_again.join()
    printed = capsys.readouterr().err
    assert (
        "message: rank 1 on n2, last known to be at generate[3] (rollout). The error on rank 0" in printed
    ) == broken
    assert "rank 2" not in printed


def test_another_launcher_learns_who_ended_the_job(
    ranks: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If all ranks of a launcher ended with 0, it would wait for the other launchers."""
    status_of(lambda: ranks[0].by(ConfigError("no")))
    capsys.readouterr()
    monkeypatch.setenv("GROUP_RANK", "1")
    assert status_of(ranks[2].follow) == USER_ERROR
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["message"]["message"] == "rank 0 ended the job: no"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("local_rank", [0, 1])
def test_without_the_store_one_rank_of_a_machine_says_so(
    said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: int
) -> None:
    with open_store() as store:
        alone = Ending(store.clone(), 4, NUM_RANKS)  # type: ignore[attr-defined]
    del store  # ends the server
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert status_of(lambda: alone.by(RuntimeError("whatever"))) == FAILED
    message = (
        f"rltrain: rank 4 on {platform.node()} is at its start: the job's store is gone, "
        "because torchrun has ended on the first node"
    )
    assert (message in capsys.readouterr().err) == (local_rank == 0)


NUM_STOPPING = 2


def request_of(rank: int, store: dist.Store, saves: bool = True) -> StopRequest:
    """Returns the stop request of a rank with one published heartbeat."""
    own = store.clone()  # type: ignore[attr-defined]
    job_store = JobStore(World(rank, NUM_STOPPING, rank, NUM_STOPPING, torch.device("cpu"), own, timeout_s=10))
    job_store.heartbeat.publish()
    return StopRequest(rank, own, job_store.observer, saves=saves, within_s=60, last_resort=lambda: "nothing is left")


@pytest.fixture
def requests(store: dist.Store) -> Iterator[list[StopRequest]]:
    """Returns the stop requests of two ranks in this process. The first one listens to signals."""
    ranks = [request_of(rank, store) for rank in range(NUM_STOPPING)]
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
    assert boundary > 0, "the signal comes too late for boundary 0"
    assert [second.verdict(step) for step in range(boundary)] == [None] * boundary
    assert first.verdict(boundary) == second.verdict(boundary) == first.verdict(boundary + 1) == number.name


@given(moves=st.lists(st.tuples(st.sampled_from(("first", "second", "third")), st.booleans()), max_size=60))
def test_the_first_rank_at_a_boundary_decides_whether_all_save_as_it_is_time(moves: list[tuple[str, bool]]) -> None:
    """No rank is more than SAVES_KEPT saves behind the first."""
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
    assert store.num_keys() <= keys_before + 2, "only the last boundary and the request"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[tuple[str, int]]:
    """Returns a queue of the final messages and exit statuses. The process does not end."""
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
    """One Ctrl-C sends SIGINT twice, from the terminal and from torchrun. At a second one, torchrun sends SIGTERM."""
    first, second = requests
    assert first.verdict(0) is None
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    assert any(second.verdict(boundary) or time.sleep(0.01) for boundary in range(1, 1000))
    with pytest.raises(queue.Empty):
        messages.get(timeout=0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    message = "SIGINT: on the second request the job ends at once, without a checkpoint; nothing is left"
    assert messages.get(timeout=20) == (message, 128 + signal.SIGINT)
    assert first.verdict(0) is None, "an earlier decision to continue stays valid"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ctrl_c_ends_a_job_that_saves_nothing_with_one_line(
    store: dist.Store, messages: queue.SimpleQueue[tuple[str, int]]
) -> None:
    stop = request_of(0, store, saves=False)
    stop.listen()
    try:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        message, status = messages.get(timeout=20)
        keys = "checkpoint.save_interval and checkpoint.save_every_s"
        assert message == f"SIGINT: the job ends and saves nothing, because {keys} are 0"
        assert status == 128 + signal.SIGINT
    finally:
        stop.close()


def test_signals_are_given_back(requests: list[StopRequest]) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    requests[0].close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    deadline = time.monotonic() + 20
    while any(thread.name == "stop request" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread ends in spite of the signal"


def test_it_is_seen_when_a_process_of_this_machine_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    name = f"{this_machine()} {process.pid}"
    assert not has_ended(name) and not has_ended(this_process())
    process.kill()
    time.sleep(0.1)
    assert has_ended(name), "its parent has not reaped it yet"
    process.wait()
    assert has_ended(name)


def test_nothing_is_said_of_processes_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_ended("node9 pid:[1] 999999") and not has_ended("")
    monkeypatch.setattr("rltrain.runtime.machine.this_machine", lambda: "")
    assert not has_ended(" 999999")


LATE_S = 0.3


@pytest.fixture
def jobs(store: dist.Store) -> Jobs:
    return Jobs(store, NUM_RANKS)


def job_store_of(rank: int, store: dist.Store) -> JobStore:
    world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, 10, has_store_in_rank_0=True)
    return JobStore(world)


def ends(jobs: Jobs, *, never: int | None = None) -> list[float]:
    """Returns the time at which rank 0 left, and the time at which every other rank finished. The last rank is late.
    Rank `never` does not leave."""

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
    """The last rank finishes more than LEAVES_WITHIN_S after the others."""
    monkeypatch.setattr(stopping, "LEAVES_WITHIN_S", LATE_S / 10)
    first, early, late = ends(jobs)
    assert first > late > early


def test_it_does_not_wait_for_ever_for_one_that_is_done(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(stopping, "LEAVES_WITHIN_S", 0.2)
    ends(jobs, never=1)
    assert "1 finished ranks have not left the store" in caplog.text


@pytest.mark.parametrize("lost", [True, False])
def test_it_ends_with_a_job_that_fails(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Covers a failure announced by another rank, and a rank lost without a message, as with its node."""

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
    await_signal_of_launcher(stop, replace(job_store.world, num_nodes=2), "SIGINT")  # not sent by agents
    assert not stop.heard.is_set()
    noticed: Any = SimpleNamespace(num_nodes=2)
    os.kill(os.getpid(), signal.SIGTERM)
    await_signal_of_launcher(stop, noticed, "SIGTERM")
    stop.close()
    assert stop.heard.is_set() and time.monotonic() - begin < stopping.NOTICED_WITHIN_S


CHILD = """
import os, sys, time
from rltrain.runtime.machine import has_lost_launcher, launcher
launcher()
first = os.getppid()
print("has begun", has_lost_launcher(), flush=True)
deadline = time.monotonic() + 30
while os.getppid() == first and time.monotonic() < deadline:
    time.sleep(0.01)
print("is an orphan", has_lost_launcher(), flush=True)
"""


@pytest.mark.parametrize(("by_torchrun", "learns"), [(True, True), (False, False)])
def test_a_process_whose_launcher_is_killed_learns_it(by_torchrun: bool, learns: bool, tmp_path: Path) -> None:
    """A process left behind by a shell, as with `nohup`, does not notice."""
    (tmp_path / "child.py").write_text(CHILD)
    launcher = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, str(tmp_path / "child.py")],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **({"TORCHELASTIC_RUN_ID": "job"} if by_torchrun else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher.stdout as told:
        assert told.readline() == "has begun False\n"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert told.readline() == f"is an orphan {learns}\n"
