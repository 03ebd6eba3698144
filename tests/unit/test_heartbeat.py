"""Tests of the heartbeats of ranks and nodes, and of the durations of tasks."""

import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rltrain.cli.report_run import read_run
from rltrain.config.schema import Timeouts
from rltrain.errors import StallError
from rltrain.observability.reporter import RoleWork
from rltrain.observability.trace import Trace, TraceFile
from rltrain.roles.role import Operations
from rltrain.runtime.ending import NEAR
from rltrain.runtime.heartbeat import Beat, Board, Heartbeat, TaskClock, TaskTime, Wait, communicates, describe_threads
from rltrain.runtime.job_store import (
    CONFIRMED_FOR_S,
    GATHERED_FROM,
    MOST_BETWEEN_LOOKS_S,
    Gathered,
    Gatherer,
    JobStore,
    Observer,
    OwnBeats,
    Waiter,
    beats_of,
)
from rltrain.runtime.world import LOOPBACK, World
from rltrain.schedule.order import Entry
from rltrain.trainer import Trainer


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def store(server: dist.TCPStore, request: pytest.FixtureRequest) -> dist.Store:
    return dist.PrefixStore(request.node.name, server)


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[list[JobStore]]:
    """Yields both ranks of a job in one process."""
    timeouts = Timeouts(no_progress_s=0.5)
    job_stores = [
        JobStore(World(rank, 2, rank, 2, torch.device("cpu"), store, timeout_s=60.0, timeouts=timeouts))
        for rank in range(2)
    ]
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
    assert other.heartbeat.board.read([0])[0].task == "starting", "begin and advance send nothing"
    deadline = time.monotonic() + 5
    while (beat := other.heartbeat.board.read([0])[0]).task == "starting":
        assert time.monotonic() < deadline
    assert (beat.task, beat.step, beat.position) == ("generate", 4, 17)
    assert beat.progress == 101, "the beginning of a task is progress as well"


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
        assert observer.verdict() is None, "rank 0 waits in a collective for rank 1, and rank 1 makes progress"
    for second in range(21, 41):
        clock[0] = float(second)
        board.put(Beat(0, **update, still_s=second, alive=second))
        board.put(Beat(1, "weight_sync", position=5, still_s=second - 20, alive=second))
        stall = observer.verdict()
        assert (stall is not None) == (second > 30), "from 20 on, rank 1 makes no progress without rank 0"
    assert stall is not None and stall.rank == 0


def test_a_rank_that_is_not_heard_of_is_lost_though_others_get_on(store):
    """Ranks that have finished or have not begun are not lost."""
    clock, board = [0.0], Board(store)
    observer = Observer(board, 4, Timeouts(lost_s=30.0), clock=lambda: clock[0])
    board.put(Beat(1, "finished", alive=1, finished=True))
    board.put(Beat(2, "update", "actor", 3, alive=1, process="n2 1.0 5"))
    lost = None
    while lost is None and clock[0] < 60:
        clock[0] += 1
        board.put(Beat(0, "generate", alive=int(clock[0])))
        lost = observer.verdict()
    assert clock[0] == 32, "in seconds since the first look"
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
    assert [stall.rank for stall in stalls if stall][-1] == 1, "no rank makes progress, but the wait continued"


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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_counts_once_to_the_innermost_task_or_wait():
    now = Clock()
    clock = TaskClock(now)
    with clock.waiting("its turn"):
        now.now += 1000
    with clock.task("generate") as generate:
        now.now += 1
        with clock.waiting("the last groups"):
            now.now += 20
            with clock.task("weight_sync") as sync:
                with clock.waiting("the others"), clock.waiting("one of them"):
                    now.now += 300
                now.now += 4000
            now.now += 30
        now.now += 2
    now.now += 1000
    assert generate == TaskTime(work_s=3, wait_s=50)
    assert sync == TaskTime(work_s=4000, wait_s=300)


def test_a_task_or_wait_that_fails_is_over():
    now = Clock()
    clock = TaskClock(now)
    with pytest.raises(KeyError), clock.task("update"), clock.waiting("the others"):
        raise KeyError
    with clock.task("score") as score:
        now.now += 1
    assert score == TaskTime(work_s=1)


def test_waits_are_spans_within_their_task(tmp_path):
    trace = TraceFile(tmp_path, 0, ("actor",))
    clock = TaskClock()
    clock.span = trace.span
    with (
        clock.waiting("its turn"),
        trace.span("weight_sync", role="actor"),
        clock.task("weight_sync"),
        clock.waiting("the others"),
        clock.waiting("one of them"),
    ):
        pass
    trace.close()
    (rank,) = read_run(tmp_path).ranks
    assert [(span.name, span.category, span.depth, span.arguments) for span in rank.spans] == [
        ("weight_sync", "task", 0, {"role": "actor"}),
        ("the others", "wait", 1, {"task": "weight_sync"}),
    ]


@pytest.fixture
def job_store() -> JobStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    return JobStore(World(0, 2, 0, 2, torch.device("cpu"), store, timeout_s=60.0))


def test_waits_by_name_are_counted_and_what_is_there_already_is_not_waited_for(job_store):
    clock, noted = job_store.heartbeat.task_clock, []

    @contextmanager
    def note(what: str, category: str, task: str):
        noted.append((what, category, task))
        yield

    clock.span = note
    there, arrived, waiter = threading.Event(), threading.Event(), Waiter(job_store, report_s=60)
    there.set()
    job_store.put("verdict", True)
    with clock.task("score") as spent:
        waiter.until(there.wait, "what is there", [1])
        job_store.get("verdict", waiting_for="a verdict that is there")
        assert noted == []
        threading.Timer(0.1, arrived.set).start()
        waiter.until(arrived.wait, "rewards", [1])
        threading.Timer(0.1, job_store.put, ("late", True)).start()
        job_store.get("late", waiting_for="a late verdict")
    assert noted == [("rewards", "wait", "score"), ("a late verdict", "wait", "score")]
    assert spent.wait_s >= 0.15


def test_a_task_reports_its_work_and_its_waits_and_not_the_sync_that_an_engine_joins_in_the_middle(job_store):
    now, reported = Clock(), {}
    clock = job_store.heartbeat.task_clock = TaskClock(now)
    order = [Entry("task", "generate", ("rollout",), 1), Entry("task", "weight_sync", ("actor", "rollout"), 2)]

    def generate(step: int, chunk: int) -> dict[str, float]:
        now.now += 1
        trainer._join_sync(1)
        with clock.waiting("the last groups"):
            now.now += 20
        return {"rollout/response_tokens": 7}

    def weight_sync(step: int, chunk: int) -> None:
        with clock.waiting("the others"):
            now.now += 300
        now.now += 4000

    def is_sync(entry: Entry) -> bool:
        return entry.name == "weight_sync"

    trainer: Any = Trainer.__new__(Trainer)
    trainer.order, trainer.rank, trainer.hosted, trainer.trace = order, 0, {"rollout"}, Trace()
    trainer.job = SimpleNamespace(
        heartbeat=job_store.heartbeat,
        world=job_store.world,
        leader_of=lambda role: 0,
        operations=Operations(),
        images=None,
        decoder=None,
    )
    trainer.work = RoleWork()
    trainer.roles, trainer.joint_tasks = {"rollout": SimpleNamespace(generate=generate)}, {"weight_sync": weight_sync}
    trainer.offloader = SimpleNamespace(enter=lambda position: None, changed=lambda role, part: None)
    trainer.in_flight = SimpleNamespace(
        has=is_sync, is_joined=is_sync, announce=lambda entry: None, come_to=lambda position, entry: False
    )
    trainer.reporter = SimpleNamespace(add=lambda step, metrics: reported.update({step: metrics}))
    trainer.transfers = SimpleNamespace(post=None, wait=None)
    cast(Trainer, trainer)._execute(0)
    assert reported == {
        1: {"perf/generate_s": 1, "perf/generate_wait_s": 20, "rollout/response_tokens": 7},
        2: {"perf/weight_sync_s": 4000, "perf/weight_sync_wait_s": 300},
    }


FIRST, OTHER = 8, 9
NODE = 1
COMES_WITHIN_S = 10.0


class Node:
    """The first rank of a node and one more, with their own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: dist.Store = dist.HashStore()
        self.second = 0.0
        self.asked: list[str] = []
        """The other rank's calls to the store since the last `pass_a_second`."""
        self.gatherer = Gatherer(NODE, self.store, self._clock)
        self.other = Gathered(NODE, self.store, self._clock)
        put = self.other.board.put
        monkeypatch.setattr(self.other.board, "put", lambda beat: self.asked.append("put") or put(beat))
        own = OwnBeats.job_ends

        def job_ends(one: OwnBeats) -> bool:
            self.asked += ["look"] if one is self.other else []
            return own(one)

        monkeypatch.setattr(OwnBeats, "job_ends", job_ends)

    def pass_a_second(self, *, first_runs: bool = True, first_looks: bool = True) -> list[str]:
        """Advances the clock. Returns the other rank's calls to the store."""
        self.second += 1
        self.asked.clear()
        self.other.put(Beat(OTHER, "update", alive=int(self.second)))
        self.other.job_ends()
        if first_runs and first_looks:
            self.gatherer.job_ends()
        if first_runs:
            comes(self.gatherer)
            self.gatherer.put(Beat(FIRST, "update", alive=int(self.second)))
            comes(self.other, COMES_WITHIN_S if first_looks else 0.05)
        return [*self.asked]

    def _clock(self) -> float:
        return self.second


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    made.gatherer._socket.close()
    made.other._socket.close()


def comes(one: Gatherer | Gathered, seconds: float = COMES_WITHIN_S) -> None:
    """Waits until a datagram arrives."""
    select.select([one._socket], [], [], seconds)


def test_the_first_rank_speaks_and_asks_for_the_others_once_it_has_said_so(node: Node) -> None:
    assert node.pass_a_second() == ["put", "look"]
    for second in range(2, 6):
        assert node.pass_a_second() == []
        assert {rank: beat.alive for rank, beat in Board(node.store).read([FIRST, OTHER]).items()} == {
            FIRST: second,
            OTHER: second,
        }


FAULTS = {"ended": 1.0, "stopped": 1 + CONFIRMED_FOR_S, "its store does not answer": 2 * CONFIRMED_FOR_S}
"""Faults of the first rank, with the seconds until the others speak for themselves."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_speak_for_themselves_where_it_does_not(node: Node, fault: str) -> None:
    node.pass_a_second()
    assert node.pass_a_second() == []
    if fault == "ended":
        node.gatherer._socket.close()
    first = {"first_runs": fault == "its store does not answer", "first_looks": False}
    asked = [node.pass_a_second(**first) for _ in range(8)]
    alone = asked.index(["put", "look"])
    assert alone <= FAULTS[fault]
    assert all(asked[alone:])
    assert Board(node.store).read([OTHER])[OTHER].alive == node.second


def test_they_leave_it_to_the_first_rank_again_once_it_runs(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    while not node.pass_a_second(first_runs=False):
        pass
    node.pass_a_second()
    assert node.pass_a_second() == []


def test_that_the_job_ends_is_passed_on_at_once(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    node.store.set(NEAR, "1")
    begin = time.monotonic()
    waiting = threading.Thread(target=node.other.wait, args=(threading.Event(), 60.0))
    waiting.start()
    assert node.gatherer.job_ends()
    waiting.join(COMES_WITHIN_S)
    assert not waiting.is_alive() and time.monotonic() - begin < COMES_WITHIN_S
    assert node.other.job_ends()
    assert "look" not in node.pass_a_second(first_runs=False)


def test_a_last_beat_waits_for_nobody(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    node.other.put(Beat(OTHER, "finished", alive=3, finished=True))
    assert Board(node.store).read([OTHER])[OTHER].finished


def test_a_last_beat_is_not_undone_by_an_older_one_on_its_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank read an older heartbeat and writes it after the other rank has written its last one."""
    for _ in range(2):
        node.pass_a_second()
    node.other.put(Beat(OTHER, "update", alive=3))
    comes(node.gatherer)
    put_lines = node.gatherer.board.put_lines

    def finish_before(lines: dict[int, str]) -> None:
        monkeypatch.setattr(node.gatherer.board, "put_lines", put_lines)
        node.other.put(Beat(OTHER, "finished", alive=4, finished=True))
        comes(node.gatherer)
        put_lines(lines)

    monkeypatch.setattr(node.gatherer.board, "put_lines", finish_before)
    node.gatherer.put(Beat(FIRST, "finished", alive=3, finished=True))
    assert all(beat.finished for beat in Board(node.store).read([FIRST, OTHER]).values())


def test_strangers_of_the_machine_are_not_heard(node: Node) -> None:
    for _ in range(2):
        node.pass_a_second()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind((LOOPBACK, 0))
        stranger.sendto(b"x" * 16 + b"10 5 {}", node.gatherer._socket.getsockname())
        comes(node.gatherer)
        node.gatherer.put(Beat(FIRST, alive=9))
    assert not Board(node.store).read([10])[10].alive


def test_a_beat_that_is_too_long_for_a_datagram_comes_to_the_store(node: Node) -> None:
    for _ in range(6):
        node.second += 1
        node.other.put(Beat(OTHER, "x" * 70_000, alive=int(node.second)))
    assert Board(node.store).read([OTHER])[OTHER].alive == 6


@pytest.mark.parametrize("size, ranks_per_node", [(GATHERED_FROM, 8), (GATHERED_FROM - 8, 8), (GATHERED_FROM, 1)])
def test_small_jobs_and_lone_ranks_gather_nothing(size: int, ranks_per_node: int) -> None:
    kinds = [
        type(beats_of(World(rank, size, rank % ranks_per_node, ranks_per_node, torch.device("cpu"), STORE, 10.0)))
        for rank in range(2)
    ]
    gathers = size >= GATHERED_FROM and ranks_per_node > 1
    assert kinds == ([Gatherer, Gathered] if gathers else [OwnBeats, OwnBeats])


class StoreThatClones(dist.HashStore):
    def clone(self) -> dist.Store:
        return self


STORE = StoreThatClones()
