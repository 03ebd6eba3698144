"""Which rank a stall is due to, from what all ranks say of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.schema import Timeouts
from rltrain.runtime.heartbeat import Beat, Wait
from rltrain.runtime.job_store import SILENT_S, RankStatus, Stall, find_stall, forbids_a_stall

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
    assert culprit_of(*early, *busy) is None, "rank 3 still decodes: all others depend on it"


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
    assert "waits at wait samples[3] for rank 1, of whom nobody is at work" in str(stall)


def test_the_host_of_the_rank_is_named_where_there_are_several() -> None:
    update = {"task": "update", "position": 4}
    waiter = status(0, communicates=True, process="node1 pid:[1] 7", **update)
    assert "rank 1 on node2 is at update" in str(stall_of(waiter, status(1, process="node2 pid:[1] 7", **update)))
    assert "rank 1 is at update" in str(stall_of(waiter, status(1, process="node1 pid:[1] 8", **update)))
    assert "rank 1 is at update" in str(stall_of(waiter, status(1, **update))), "one that has not told its host"


def test_a_rank_that_has_just_finished_was_at_work_until_then():
    """The others' beats are up to an interval old: they left the same last task as it did, and have not said so."""
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
    """One position of a random order: a joint task of `role`, then a transfer to `receiver`, where there is one."""

    role: str
    receiver: str | None


@st.composite
def hung_worlds(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[Step], int, int]:
    """(ranks by role, order, hung rank, position at which it hangs)."""
    num_ranks = draw(st.integers(2, 6))
    roles = {name: tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))) for name in ("a", "b", "c")}
    roles["rest"] = tuple(range(num_ranks))  # so that every rank has something to do
    names = st.sampled_from(sorted(roles))
    order = draw(st.lists(st.builds(Step, names, st.none() | names), min_size=1, max_size=8))
    position = draw(st.integers(0, len(order) - 1))
    return roles, order, draw(st.sampled_from(roles[order[position].role])), position


def run_until_blocked(
    roles: Mapping[str, tuple[int, ...]], order: list[Step], hung: int, hangs_at: int
) -> dict[int, Beat]:
    """Every rank's beat once nobody can go on: rank `hung` never leaves its task at position `hangs_at`."""
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
    # While it gets on, however slowly, nobody is blamed: all that are blocked depend on it.
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
