"""Tests of the job's store, of finding the cause of a stall, and of the watchdog."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.schema import Timeouts
from rltrain.runtime.heartbeat import Beat, Board, Wait
from rltrain.runtime.job_store import SILENT_S, JobStore, RankStatus, Stall, find_stall, forbids_a_stall
from rltrain.runtime.machine import JobThread, end_job_by_threads
from rltrain.runtime.watchdog import StoreWatch, Watchdog
from rltrain.runtime.world import World
from tests.support.shared_store import on_ranks, open_store

NUM_RANKS = 3


def test_nobody_goes_on_from_a_meeting_before_all_have_come() -> None:
    def come(rank: int, store: dist.Store) -> int:
        job_store = JobStore(World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, timeout_s=10))
        job_store.heartbeat.publish()
        time.sleep(0.02 * rank)
        store.add("came", 1)
        job_store.meet("the end", NUM_RANKS, waiting_for="the end of the others")
        return store.add("came", 0)

    with open_store() as store:
        assert on_ranks(store, come, NUM_RANKS) == [NUM_RANKS] * NUM_RANKS


LIMITS = Timeouts(no_progress_s=100.0)
STILL_S, MOVING_S = 101.0, 99.0


def status(rank: int, still_s: float = STILL_S, silent_s: float = 1.0, **fields) -> RankStatus:
    return RankStatus(Beat(rank, **fields), still_s, silent_s)


def waiting_for(*ranks: int) -> Wait:
    return Wait("wait samples[3]", ranks, since=0.0)


def stall_of(*statuses: RankStatus, limits: Timeouts = LIMITS) -> Stall | None:
    return find_stall(statuses, limits)


def culprit_of(*statuses: RankStatus) -> int | None:
    stall = stall_of(*statuses)
    return None if stall is None else stall.rank


def test_a_rank_that_does_nothing_is_blamed_after_the_limit_and_not_before():
    waiter = status(0, task="wait", wait=waiting_for(1))
    assert culprit_of(waiter, status(1, task="generate", still_s=MOVING_S)) is None
    assert culprit_of(waiter, status(1, task="generate", still_s=STILL_S)) == 1


def test_a_task_may_have_a_limit_of_its_own():
    limits = Timeouts(no_progress_s=100.0, tasks={"generate": 1000.0, "score": 10.0})
    assert stall_of(status(0, task="generate"), limits=limits) is None
    assert stall_of(status(0, task="generate", still_s=1001.0), limits=limits) is not None
    assert stall_of(status(0, task="score", still_s=11.0), limits=limits) is not None


def test_waiting_for_one_that_gets_on_has_no_limit():
    slow = status(1, task="generate", still_s=1.0)
    assert culprit_of(status(0, still_s=1e6, wait=waiting_for(1)), slow) is None


def test_in_a_chain_of_waits_the_last_is_blamed():
    chain = [status(rank, wait=waiting_for(rank + 1)) for rank in range(3)]
    stall = stall_of(*chain, status(3, task="generate", role="rollout", step=7, still_s=120.0))
    assert stall is not None
    assert stall.rank == 3
    assert [waiter.beat.rank for waiter in stall.waiters] == [0, 1, 2]
    assert "rank 3 is at generate[7] (rollout) and has shown no progress for 120 s" in str(stall)
    assert "rank 2 is at starting and waits at wait samples[3] for rank 3" in str(stall)


def test_a_rank_blocked_in_a_joint_task_is_not_blamed_for_one_that_has_not_come():
    early = [status(rank, task="weight_sync", position=9) for rank in (0, 1)]
    late = [status(rank, task="generate", position=5) for rank in (2, 3)]
    hung = [replace(late[0], beat=replace(late[0].beat, communicates=True)), replace(late[1], still_s=STILL_S)]
    assert culprit_of(*early, *hung) == 3
    busy = [replace(late[0], still_s=STILL_S), replace(late[1], still_s=1.0)]
    assert culprit_of(*early, *busy) is None, "rank 3 still decodes, and all others depend on it"


def test_within_a_task_the_one_outside_the_collective_is_blamed():
    update = {"task": "update", "position": 4}
    assert culprit_of(status(0, still_s=200.0, communicates=True, **update), status(1, **update)) == 1


def test_where_stacks_do_not_tell_the_number_of_collectives_does():
    update = {"task": "update", "position": 4}
    ahead, behind = {"0-1": 7, "0-3": 2}, {"0-1": 6, "0-3": 2}
    assert culprit_of(status(0, sequences=behind, **update), status(1, sequences=ahead, **update)) == 0
    assert culprit_of(status(0, sequences=ahead, **update), status(1, sequences=behind, **update)) == 1


def test_a_process_that_does_not_run_is_blamed_first():
    update = {"task": "update", "position": 4}
    stall = stall_of(status(0, still_s=300.0, **update), status(1, silent_s=SILENT_S + 1, **update))
    assert stall is not None and stall.rank == 1
    assert "rank 1 was last known to be at update, 31 s ago, and its process has not run since" in str(stall)


def test_a_task_out_of_turn_needs_all_of_its_ranks_wherever_they_are():
    joins = {"task": "weight_sync"}
    generate = {"task": "generate", "position": 30}
    joined = [status(rank, **joins) for rank in (0, 1)]
    assert culprit_of(*joined, status(2, still_s=1.0, **generate), status(3, still_s=1.0, **generate)) is None
    assert culprit_of(*joined, status(2, communicates=True, **generate), status(3, **generate)) == 3


def test_those_that_have_finished_are_never_blamed():
    assert culprit_of(status(0, finished=True), status(1, finished=True)) is None
    stall = stall_of(status(0, wait=waiting_for(1)), status(1, finished=True))
    assert stall is not None and stall.rank == 0
    assert "waits at wait samples[3] for rank 1, but none of them is at work" in str(stall)


def test_the_host_of_the_rank_is_named_where_there_are_several() -> None:
    update = {"task": "update", "position": 4}
    waiter = status(0, communicates=True, process="node1 pid:[1] 7", **update)
    assert "rank 1 on node2 is at update" in str(stall_of(waiter, status(1, process="node2 pid:[1] 7", **update)))
    assert "rank 1 is at update" in str(stall_of(waiter, status(1, process="node1 pid:[1] 8", **update)))
    assert "rank 1 is at update" in str(stall_of(waiter, status(1, **update))), "the rank has not reported its host"


def test_a_rank_that_has_just_finished_was_at_work_until_then():
    """The others' heartbeats are up to one interval old. They left the same last task, but have not reported it yet."""
    left_behind = status(0, task="weight_sync", position=9, communicates=True)
    assert culprit_of(left_behind, status(1, still_s=1.0, finished=True)) is None
    ended_long_ago = status(1, still_s=STILL_S, silent_s=STILL_S, finished=True)
    assert culprit_of(left_behind, ended_long_ago) == 0


def test_a_wait_for_nobody_in_particular_is_one_for_everybody():
    waiter = status(0, wait=waiting_for())
    assert culprit_of(waiter, status(1), status(2, wait=waiting_for())) == 1, "rank 1 works alone and hangs"
    assert culprit_of(waiter, status(1, still_s=5.0), status(2, still_s=5.0)) is None


@dataclass(frozen=True)
class Step:
    """One position of a random order: a joint task of `role`, and a transfer to `receiver` if there is one."""

    role: str
    receiver: str | None


@st.composite
def hung_worlds(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[Step], int, int]:
    """Draws (ranks by role, order, hung rank, position of the hang)."""
    num_ranks = draw(st.integers(2, 6))
    roles = {name: tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))) for name in ("a", "b", "c")}
    roles["rest"] = tuple(range(num_ranks))  # every rank has something to do
    names = st.sampled_from(sorted(roles))
    order = draw(st.lists(st.builds(Step, names, st.none() | names), min_size=1, max_size=8))
    position = draw(st.integers(0, len(order) - 1))
    return roles, order, draw(st.sampled_from(roles[order[position].role])), position


def run_until_blocked(
    roles: Mapping[str, tuple[int, ...]], order: list[Step], hung: int, hangs_at: int
) -> dict[int, Beat]:
    """Returns the last heartbeat of every rank. Rank `hung` never leaves its task at position `hangs_at`."""
    ranks = roles["rest"]
    cursor = dict.fromkeys(ranks, 0)  # 2 p: the task of order[p], 2 p + 1: waiting for its transfer
    beats: dict[int, Beat] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            beats[rank] = _beat(rank, cursor[rank], order, roles)
            if cursor[rank] < 2 * len(order) and not _is_blocked(rank, cursor, order, roles, hung, hangs_at):
                cursor[rank] += 1
                moved = True
    communicates = {rank: rank != hung for rank in ranks}
    return {rank: replace(beats[rank], communicates=communicates[rank]) for rank in ranks}


def _beat(rank: int, cursor: int, order: list[Step], roles: Mapping[str, tuple[int, ...]]) -> Beat:
    position, waits = divmod(cursor, 2)
    if position == len(order):
        return Beat(rank, task="finished", finished=True)
    step = order[position]
    if waits:
        return Beat(rank, task="wait", position=cursor, wait=Wait("wait", roles[step.role], 0.0))
    return Beat(rank, task="task", position=cursor)


def _is_blocked(rank, cursor, order, roles, hung, hangs_at) -> bool:
    position, waits = divmod(cursor[rank], 2)
    step = order[position]
    if waits:
        return step.receiver is not None and rank in roles[step.receiver] and _not_past(step, position, cursor, roles)
    if rank not in roles[step.role]:
        return False
    if (rank, position) == (hung, hangs_at):
        return True
    others_missing = any(cursor[peer] < cursor[rank] for peer in roles[step.role])
    return others_missing or (position == hangs_at and hung in roles[step.role])


def _not_past(step, position, cursor, roles) -> bool:
    return any(cursor[source] <= 2 * position for source in roles[step.role])


@given(hung_worlds())
def test_whatever_the_order_the_rank_that_hangs_is_blamed(world):
    roles, order, hung, hangs_at = world
    beats = run_until_blocked(roles, order, hung, hangs_at)
    assert not beats[hung].finished
    stall = find_stall([RankStatus(beat, STILL_S, 1.0) for beat in beats.values()], LIMITS)
    assert stall is not None and stall.rank == hung
    # While that rank makes progress, no rank is blamed, because all blocked ranks depend on it.
    at_work = [RankStatus(beat, 1.0 if rank == hung else 1e6, 1.0) for rank, beat in beats.items()]
    assert find_stall(at_work, LIMITS) is None


@given(
    st.lists(
        st.builds(
            lambda rank, still_s, silent_s, task, finished: status(
                rank, still_s, silent_s, task=task, finished=finished
            ),
            st.integers(0, 5),
            st.floats(0, 400),
            st.floats(0, 400),
            st.sampled_from(["update", "generate"]),
            st.booleans(),
        ),
        min_size=1,
        unique_by=lambda made: made.beat.rank,
    )
)
def test_a_rank_that_forbids_a_stall_is_right_whatever_the_others_say(statuses):
    limits = Timeouts(no_progress_s=200, tasks={"update": 100})
    if any(forbids_a_stall(one, limits) for one in statuses):
        assert find_stall(statuses, limits) is None


@pytest.mark.parametrize("num_waiters", [1, 6])
def test_the_message_names_some_of_the_waiters_and_counts_the_rest(num_waiters):
    waiters = [status(rank, wait=waiting_for(9)) for rank in range(num_waiters)]
    message = str(stall_of(*waiters, status(9)))
    assert message.count("and waits at") == min(num_waiters, 4)
    assert ("and 2 more ranks wait" in message) == (num_waiters == 6)


NUM_WATCHED = 9
NO_PROGRESS_S = 16


class Node:
    """The watchdogs of a job's ranks, with their own clock. `frozen` ranks are silent, and the others cannot continue
    without them."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        self.second = self.still_s = 0
        self.board = Board(store)
        limits = Timeouts(no_progress_s=NO_PROGRESS_S)
        self.watchdogs = {}
        for rank in range(NUM_WATCHED):
            world = World(
                rank, NUM_WATCHED, rank, NUM_WATCHED, torch.device("cpu"), store, timeout_s=10, timeouts=limits
            )
            job_store = JobStore(world, guarded=True)
            watchdog = Watchdog(job_store.heartbeat, job_store.observer, store, folder)
            watchdog.observer.clock = lambda: float(self.second)
            self.watchdogs[rank] = watchdog

    def pass_a_second(self, frozen: range) -> dict[int, str | None]:
        """Returns the stall seen by each judging rank, by rank."""
        self.second += 1
        self.still_s = self.still_s + 1 if frozen else 0
        beat = Beat(0, "update", "actor", 3, position=7, still_s=self.still_s, alive=self.second, process="elsewhere 1")
        running = [rank for rank in range(NUM_WATCHED) if rank not in frozen]
        for rank in running:
            self.board.put(replace(beat, rank=rank))
        judging = [rank for rank in running if self.watchdogs[rank]._judges()]
        return {rank: str(self.watchdogs[rank].observer.verdict() or "") for rank in judging}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_store() as store:
        yield Node(store, tmp_path)


def test_the_lowest_rank_judges(node: Node) -> None:
    assert [node.pass_a_second(frozen=range(0)) for _ in range(5)] == [{0: ""}] * 5


@pytest.mark.parametrize("frozen", [range(1), range(NUM_WATCHED - 1)], ids=["rank 0", "all but the last rank"])
def test_where_it_does_not_run_the_next_one_finds_it_hardly_later(node: Node, frozen: range) -> None:
    node.pass_a_second(frozen=range(0))
    verdicts = [node.pass_a_second(frozen) for _ in range(NO_PROGRESS_S + 3)]
    found = next(second for second, judged in enumerate(verdicts) if any(judged.values()))
    assert found <= NO_PROGRESS_S + 2, "in seconds from the last beat on"
    (verdict,) = verdicts[found].values()
    assert verdict is not None and f"rank 0 was last known to be at update[3] (actor), {found + 1} s ago" in verdict


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_silent_store_ends_the_rank(
    local_rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    ended = threading.Event()
    watch = StoreWatch(
        3, 0.3, "timeouts.lost_s", lambda: "is at update[4] (actor)", end=lambda status: ended.set(), look_s=0.02
    )
    watch.start()
    for _ in range(10):
        assert not ended.wait(0.05), "it answers"
        watch.answered()
    assert ended.wait(10)
    told = capsys.readouterr().err
    if local_rank == "0":
        assert (
            "rltrain: rank 3 on " in told
            and "is at update[4] (actor): the job's store on n1 has not answered" in told
            and "for timeouts.lost_s = 0.3 s" in told
        )
    else:
        assert not told


def test_a_watch_that_is_over_ends_nothing() -> None:
    ended = threading.Event()
    watch = StoreWatch(0, 0.05, "timeouts.lost_s", str, end=lambda status: ended.set(), look_s=0.02)
    watch.start()
    watch.stop()
    assert not ended.wait(0.3)


LIMIT_S = 20.0

Ends = queue.SimpleQueue[tuple[str, BaseException]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Returns a queue of (thread, error). Each entry would have ended the job."""
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
    """Otherwise the other ranks would treat this one as stopped and end the job as stalled."""
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
