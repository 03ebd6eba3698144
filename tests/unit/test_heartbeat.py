"""What a rank says of itself, how others read it, and waits whose limit runs only while nobody gets on."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.errors import StallError
from rltrain.runtime.heartbeat import Beat, Board, Heartbeat, Wait, communicates, describe_threads
from rltrain.runtime.job_store import MOST_BETWEEN_LOOKS_S, JobStore, Observer, Waiter
from rltrain.runtime.world import World


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def store(server: dist.TCPStore, request: pytest.FixtureRequest) -> dist.Store:
    return dist.PrefixStore(request.node.name, server)


def make_bulletin(store: dist.Store, rank: int, no_progress_s: float = 60.0) -> JobStore:
    timeouts = Timeouts(no_progress_s=no_progress_s)
    return JobStore(World(rank, 2, rank, 2, torch.device("cpu"), store, timeout_s=60.0, timeouts=timeouts))


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[list[JobStore]]:
    """Both ranks of a job, in one process."""
    job_stores = [make_bulletin(store, rank, no_progress_s=0.5) for rank in range(2)]
    for job_store in job_stores:
        job_store.heartbeat.interval_s = 0.05
    yield job_stores
    for job_store in job_stores:
        job_store.heartbeat.finish()


def test_a_beat_comes_back_as_it_was(store):
    beat = Beat(3, "update", "actor", 7, 2, 41, 1.5, 12, 0.25, 4, True, {"0-3": 9}, Wait("x", (1, 2), 2.0))
    Board(store).put(beat)
    assert Board(store).read([3]) == {3: beat}


def test_a_rank_without_a_beat_is_starting(store):
    Board(store).put(Beat(0, "generate"))
    assert Board(store).read([0, 1]) == {0: Beat(0, "generate"), 1: Beat(1)}
    assert Board(store).read([5, 6]) == {5: Beat(5), 6: Beat(6)}


def test_a_task_is_named_with_its_step_chunk_and_role():
    assert str(Beat(0, "generate", "rollout", 3)) == "generate[3] (rollout)"
    assert str(Beat(0, "score", "reward", 3, 2)) == "score[3.2] (reward)"
    assert str(Beat(0, "building its roles")) == "building its roles"


def test_what_a_rank_does_reaches_the_others_without_a_write_of_its_own(ranks):
    mine, other = ranks
    mine.heartbeat.start()
    mine.heartbeat.begin("generate", "rollout", 4, position=17)
    mine.heartbeat.advance(100)
    assert other.heartbeat.board.read([0])[0].task == "starting", "nothing is sent by begin and advance"
    deadline = time.monotonic() + 5
    while (beat := other.heartbeat.board.read([0])[0]).task == "starting":
        assert time.monotonic() < deadline
    assert (beat.task, beat.step, beat.position) == ("generate", 4, 17)
    assert beat.progress == 101, "beginning a task is progress as well"


def test_marking_progress_is_cheap(store):
    heartbeat = Heartbeat(0, store)
    start = time.perf_counter()
    for _ in range(10_000):
        heartbeat.advance()
    assert (time.perf_counter() - start) / 10_000 < 20e-6


def test_waits_nest_and_what_is_done_meanwhile_is_no_wait(store):
    heartbeat = Heartbeat(0, store)
    heartbeat.begin("wait", "actor", 2, position=5)
    with heartbeat.waiting("wait samples[2]", [1]):
        with heartbeat.meanwhile():
            heartbeat.begin("weight_sync", "actor", 3)
            inside = heartbeat.now()
            with heartbeat.waiting("the meeting", [2]):
                assert heartbeat.now().wait.what == "the meeting"
        after = heartbeat.now()
    assert (inside.task, inside.step, inside.position, inside.wait) == ("weight_sync", 3, None, None)
    assert (after.task, after.position, after.wait.ranks) == ("wait", 5, (1,))
    assert heartbeat.now().wait is None
    assert heartbeat.now().progress > after.progress, "the end of a wait is progress"


def test_stillness_is_counted_from_the_last_progress_on_the_clock_of_whoever_looks(store):
    clock = [100.0]
    observer = Observer(Board(store), 1, Timeouts(), clock=lambda: clock[0])
    board, beat = Board(store), Beat(0, "generate", still_s=4.0, alive=1)
    board.put(beat)
    assert observer.look([0])[0].still_s == 4.0
    for _ in range(7):
        clock[0] += 1
        seen = observer.look([0])[0]
    assert (seen.still_s, seen.silent_s) == (11.0, 7.0)
    board.put(replace(beat, still_s=0.5, alive=2))
    assert (observer.look([0])[0].still_s, observer.look([0])[0].silent_s) == (0.5, 0.0)


def test_time_in_which_the_observer_did_not_run_is_not_silence_of_others(store):
    clock = [100.0]
    observer = Observer(Board(store), 1, Timeouts(), clock=lambda: clock[0])
    Board(store).put(Beat(0, "generate", alive=1))
    observer.look([0])
    clock[0] += 3600
    assert observer.look([0])[0].silent_s == MOST_BETWEEN_LOOKS_S


def test_time_in_which_a_process_did_not_run_is_not_stillness(store, monkeypatch):
    heartbeat, clock = Heartbeat(0, store), [100.0]
    monkeypatch.setattr("rltrain.runtime.heartbeat.time.monotonic", lambda: clock[0])
    heartbeat.advance()
    seen = []

    def sleeping(seconds_asleep: list[float]):
        def wait(interval_s: float) -> bool:
            seen.append(heartbeat.now().still_s)
            clock[0] += seconds_asleep[0] if seconds_asleep else 0
            return not seconds_asleep or seconds_asleep.pop(0) is None

        return wait

    heartbeat._ended.wait = sleeping([1.0, 1.0, 500.0, 1.0])
    heartbeat._run()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_having_waited_for_one_that_got_on_is_no_fault_once_that_one_has_gone_ahead(store):
    clock, board = [0.0], Board(store)
    observer = Observer(board, 2, Timeouts(no_progress_s=10.0), clock=lambda: clock[0])
    update = {"task": "update", "position": 4}
    for second in range(21):
        clock[0] = float(second)
        board.put(Beat(0, **update, still_s=second, alive=second))
        board.put(Beat(1, **update, still_s=0.5, alive=second))
        assert observer.verdict() is None, "rank 0 waits in a collective for rank 1, which gets on"
    for second in range(21, 41):
        clock[0] = float(second)
        board.put(Beat(0, **update, still_s=second, alive=second))
        board.put(Beat(1, "weight_sync", position=5, still_s=second - 20, alive=second))
        stall = observer.verdict()
        assert (stall is not None) == (second > 30), "from 20 on, rank 1 gets no further without rank 0"
    assert stall is not None and stall.rank == 0


def test_a_rank_that_is_not_heard_of_is_lost_though_others_get_on(store):
    """One that has finished, or has yet to begin, is not."""
    clock, board = [0.0], Board(store)
    observer = Observer(board, 4, Timeouts(lost_s=30.0), clock=lambda: clock[0])
    board.put(Beat(1, "finished", alive=1, finished=True))
    board.put(Beat(2, "update", "actor", 3, alive=1, process="n2 1.0 5"))
    lost = None
    while lost is None and clock[0] < 60:
        clock[0] += 1
        board.put(Beat(0, "generate", alive=int(clock[0])))
        lost = observer.verdict()
    assert clock[0] == 32, "in seconds from the first look on"
    assert "rank 2 on n2 was last known to be at update[3] (actor), 31 s ago" in str(lost)


def test_a_wait_lasts_as_long_as_the_other_gets_on(ranks, caplog):
    mine, other = ranks
    other.heartbeat.begin("generate", "rollout", 3)
    other.heartbeat.start()
    mine.heartbeat.start()
    arrived, start = threading.Event(), time.monotonic()

    def work() -> None:
        while time.monotonic() - start < 1.5:
            other.heartbeat.advance()
            time.sleep(0.05)
        arrived.set()

    threading.Thread(target=work).start()
    with caplog.at_level(logging.WARNING):
        Waiter(mine, report_s=0.3).until(arrived.wait, "wait samples[3]", [1])
    assert time.monotonic() - start > 2 * mine.world.timeouts.no_progress_s
    assert "rank 0 waits at wait samples[3]: rank 1 is at generate[3] (rollout) for" in caplog.text


def test_whatever_breaks_a_transfer_ends_the_wait_for_it(ranks):
    def broken(seconds: float) -> bool:
        raise ConnectionResetError("by the other side")

    with pytest.raises(StallError, match="wait samples.*rank 1.*the connection broke: by the other side"):
        Waiter(ranks[0], report_s=60).until(broken, "wait samples[3]", [1])


def test_a_wait_for_one_that_does_nothing_ends_with_its_name(ranks):
    mine, other = ranks
    other.heartbeat.begin("generate", "rollout", 3)
    other.heartbeat.start()
    mine.heartbeat.start()
    start = time.monotonic()
    with pytest.raises(StallError, match=r"waits at wait samples\[3\]: .*rank 1 is at generate\[3\] .* no progress"):
        Waiter(mine, report_s=0.2).until(threading.Event().wait, "wait samples[3]", [1])
    assert 0.5 < time.monotonic() - start < 3


def test_in_a_guarded_job_a_wait_leaves_the_end_to_the_watchdog(ranks):
    mine, other = ranks
    mine.guarded = True
    for job_store in ranks:
        job_store.heartbeat.start()
    arrived, stalls = threading.Event(), []
    threading.Timer(1.5, arrived.set).start()
    see = lambda: stalls.append(other.observer.verdict())  # noqa: E731
    Waiter(mine, report_s=0.2).until(arrived.wait, "wait samples[3]", [1], serve=see)
    assert [stall.rank for stall in stalls if stall][-1] == 1, "nobody gets on, and yet the wait went on"


def test_a_rank_serves_others_while_it_waits(ranks):
    mine, _ = ranks
    served = []
    arrived = threading.Event()
    threading.Timer(0.5, arrived.set).start()
    Waiter(mine, report_s=60).until(arrived.wait, "wait samples[3]", [1], serve=lambda: served.append(time.monotonic()))
    gaps = [later - earlier for earlier, later in zip(served, served[1:], strict=False)]
    assert len(served) > 20 and sorted(gaps)[len(gaps) // 2] < 0.02


def test_a_value_that_nobody_leaves_ends_the_wait_for_it(ranks):
    mine, other = ranks
    other.heartbeat.start()
    mine.heartbeat.start()
    with pytest.raises(StallError, match="rank 0 waits for the verdict of rank 1: rank 1 is at starting"):
        mine.get("stop/3", waiting_for="the verdict of rank 1")
    other.put("stop/3", {"stop": True})
    assert mine.get("stop/3", waiting_for="the verdict of rank 1") == {"stop": True}


def test_stacks_tell_where_a_thread_is():
    entered, leave = threading.Event(), threading.Event()

    def sleeping_soundly() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=sleeping_soundly, name="sleeper")
    thread.start()
    entered.wait()
    text = describe_threads()
    leave.set()
    thread.join()
    assert "thread sleeper:" in text and "in sleeping_soundly" in text
    assert text.index("MainThread") < text.index("sleeper")


def test_a_thread_in_a_collective_is_told_from_one_at_work():
    import sys

    def at_work():
        return communicates(sys._getframe())

    module = {"__name__": "torch.distributed.distributed_c10d"}
    exec("import sys\ndef all_reduce(ask):\n    return ask(sys._getframe())", module)
    assert not at_work()
    nowhere = SimpleNamespace(f_globals={}, f_code=at_work.__code__, f_lineno=None)
    assert not communicates(nowhere), "in the middle of a call Python may not know the line"  # type: ignore[arg-type]
    assert module["all_reduce"](communicates)  # type: ignore[operator]
