"""Replays an order. Checks that it can finish, and computes its shortest time and its overlapping tasks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rltrain.errors import ConfigError
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import SYNC_EVALUATION, WEIGHT_SYNC, Entry, Order, program

# The check that an order can finish. It replays all ranks' programs before a job starts.


def check(entries: Iterable[Entry], placement: Placement) -> None:
    """Replays all ranks' programs. Raises ConfigError, with rank and entry, if ranks would wait for each other forever.

    A task needs all ranks of its roles. A wait needs the posts of all ranks of its source. A post first needs the waits
    for earlier posts of its rank, if these waits come before it in the order. Their send buffers are then free. Ranks
    with equal roles execute equal programs, so only one of them is replayed.
    """
    order = [*entries]
    _check_transfers(order)
    kinds = {placement.hosts(rank): rank for role in placement.roles for rank in placement.ranks(role)}
    programs = {rank: program(order, placement, rank) for rank in kinds.values()}
    members = {role: {rank for hosted, rank in kinds.items() if role in hosted} for role in placement.roles}
    replay = _Replay(order, members)
    cursor = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for rank, entries in programs.items():
            while cursor[rank] < len(entries) and replay.may_pass(rank, entries[cursor[rank]]):
                cursor[rank] += 1
                moved = True
    stuck = {rank: entries[cursor[rank]] for rank, entries in programs.items() if cursor[rank] < len(entries)}
    if stuck:
        where = ", ".join(f"rank {rank} at {entry}" for rank, entry in sorted(stuck.items()))
        raise ConfigError(f"the order of tasks cannot finish: {where} would wait for each other forever")


class _Replay:
    """The ranks that have arrived at each entry, and the rules for passing it."""

    def __init__(self, order: Sequence[Entry], members: dict[str, set[int]]) -> None:
        self.members = members
        self.position = {entry: i for i, entry in enumerate(order)}
        self.wait_of = {e.transfer: e for e in order if e.kind == "wait"}
        self.post_of = {e.transfer: e for e in order if e.kind == "post"}
        self.arrived: dict[Entry, set[int]] = {entry: set() for entry in order}
        self.done: dict[Entry, set[int]] = {entry: set() for entry in order}
        self.outbox: dict[int, list[Entry]] = {}

    def may_pass(self, rank: int, entry: Entry) -> bool:
        self.arrived[entry].add(rank)
        passes = {"task": self._task, "post": self._post, "wait": self._wait}[entry.kind](rank, entry)
        if passes:
            self.done[entry].add(rank)
        return passes

    def _task(self, rank: int, entry: Entry) -> bool:
        return all(self.arrived[entry] >= self.members[role] for role in entry.roles)

    def _wait(self, rank: int, entry: Entry) -> bool:
        return self.done[self.post_of[entry.transfer]] >= self.members[entry.roles[0]]

    def _post(self, rank: int, entry: Entry) -> bool:
        outbox = self.outbox.setdefault(rank, [])
        due = [e for e in outbox if self.position[self.wait_of[e.transfer]] < self.position[entry]]
        if not all(self.done[self.wait_of[e.transfer]] >= self.members[e.roles[1]] for e in due):
            return False
        self.outbox[rank] = [e for e in outbox if e not in due] + [entry]
        return True


def _check_transfers(order: Sequence[Entry]) -> None:
    if len(set(order)) != len(order):
        raise ConfigError("the order of tasks names an entry twice")
    posted = set()
    for entry in order:
        if entry.kind == "post":
            posted.add(entry.transfer)
        elif entry.kind == "wait":
            if entry.transfer not in posted:
                raise ConfigError(f"the order of tasks waits before the post: {entry}")
            posted.remove(entry.transfer)
    if posted:
        raise ConfigError(f"the order of tasks never waits for {sorted(posted)}")


# The shortest time of an order. Its tasks take their measured time, everything else takes none.

Seconds = Callable[[Entry, int], float]
"""Seconds of a task on a rank, without its waits for other ranks."""


class Period(NamedTuple):
    """The time of a task, from its first rank's start to its last rank's end. Seconds since the start of the run."""

    start: float
    end: float


def timetable(order: Order, placement: Placement, seconds: Seconds) -> dict[Entry, Period]:
    """Returns the earliest possible period of each task.

    Transfers take no time. A weight sync to engines waits for the actor. An engine waits for the sync only at its place
    in the order, like an in-flight sync. Other tasks of several roles wait for all of their ranks. The order has posts
    before waits, so one pass over it is enough.
    """
    clock: dict[int, float] = defaultdict(float)
    posted: dict[tuple[object, ...], float] = {}
    periods: dict[Entry, Period] = {}
    for entry in order:
        ranks = sorted({rank for role in entry.actors for rank in placement.ranks(role)})
        if entry.kind == "post":
            posted[entry.transfer] = max(clock[rank] for rank in ranks)
            continue
        earliest = posted[entry.transfer] if entry.kind == "wait" else _meeting(entry, placement, clock)
        for rank in ranks:
            clock[rank] = max(clock[rank], earliest)
        if entry.kind == "task":
            start = min(clock[rank] for rank in ranks)
            for rank in ranks:
                clock[rank] += seconds(entry, rank)
            periods[entry] = Period(start, max(clock[rank] for rank in ranks))
    return periods


def _meeting(task: Entry, placement: Placement, clock: dict[int, float]) -> float:
    """Returns the time at which all ranks awaited by `task` have arrived."""
    if task.name in (WEIGHT_SYNC, SYNC_EVALUATION):
        return max(clock[rank] for rank in placement.ranks("actor"))
    if len(task.roles) > 1:
        return max(clock[rank] for role in task.roles for rank in placement.ranks(role))
    return 0.0


# Tasks on different ranks that can run at the same time, because neither waits for the other.


def overlapping_tasks(order: Order, placement: Placement, *, syncs_in_flight: bool) -> set[tuple[str, str]]:
    """Returns pairs of task names such as ("generate (rollout)", "update (actor)"), each pair in alphabetical order.

    Quadratic in the length of the order. Use it for a few steps only.
    """
    before = _predecessors(order, placement, syncs_in_flight)
    tasks = [(i, entry, _ranks(entry, placement)) for i, entry in enumerate(order) if entry.kind == "task"]
    pairs = set()
    for i, first, first_ranks in tasks:
        for j, second, second_ranks in tasks:
            if i < j and not before[j] >> i & 1 and first_ranks.isdisjoint(second_ranks):
                one, other = sorted((_words(first), _words(second)))
                pairs.add((one, other))
    return pairs


def _predecessors(order: Order, placement: Placement, syncs_in_flight: bool) -> list[int]:
    """Returns, per entry, a bit set of the entries that end before it can begin. All ranks of a role begin together.

    An entry follows the earlier entries of its ranks, and a wait follows its post. The actor does not wait for an
    engine if weights change in flight. The engine's next task still follows the sync.
    """
    before: list[int] = []
    posts: dict[tuple[object, ...], int] = {}
    last: dict[int, int] = defaultdict(int)
    for i, entry in enumerate(order):
        ranks = _ranks(entry, placement)
        in_flight = entry.name == SYNC_EVALUATION or (entry.name == WEIGHT_SYNC and syncs_in_flight)
        leading = placement.ranks("actor") if in_flight else ranks
        own = posts[entry.transfer] if entry.kind == "wait" else 0
        for rank in leading:
            own |= last[rank]
        before.append(own)
        for rank in ranks:
            last[rank] |= own | 1 << i
        if entry.kind == "post":
            posts[entry.transfer] = own | 1 << i
    return before


def _ranks(entry: Entry, placement: Placement) -> set[int]:
    return {rank for role in entry.actors for rank in placement.ranks(role)}


def _words(task: Entry) -> str:
    return f"{task.name} ({'+'.join(task.roles)})"
