"""The check that an order can finish: all ranks' programs are replayed before anything starts."""

from collections.abc import Iterable, Sequence

from rltrain.errors import ConfigError
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import Entry, program


def check(entries: Iterable[Entry], placement: Placement) -> None:
    """Replay all ranks' programs; ConfigError with rank and entry if they would wait for each other forever.

    A task needs all ranks of its roles, a wait needs the posts of all ranks of its source, and a post first needs the
    waits of those earlier posts of its rank whose wait stands before it in the order (their send buffers are retired).
    Ranks that host the same roles execute the same program, so one of each kind is replayed.
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
    """Who has arrived at which entry, and what a rank may therefore pass."""

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
