"""Who holds up the job: from what all ranks say of themselves to the one rank that a stall is due to. No communication.

A stall is that no rank shows progress for longer than a limit. As all ranks follow one order of tasks, whoever is still
at work at its lowest position is what the others wait for, directly or not.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rltrain.config.schema import Timeouts
from rltrain.liveness.heartbeat import Beat
from rltrain.system.processes import host_of

SILENT_S = 30.0
"""A rank without a beat for this long, or half of the shortest limit, does not run: stopped, or in a call that holds
Python's interpreter lock."""


@dataclass(frozen=True)
class RankStatus:
    """A rank as one observer sees it, by the observer's own clock."""

    beat: Beat
    still_s: float
    """Since it last got on."""
    silent_s: float
    """Since its last beat."""

    @property
    def works(self) -> bool:
        """Neither done nor waiting for anybody by name."""
        return not self.beat.finished and self.beat.wait is None


@dataclass(frozen=True)
class Stall:
    """`culprit` holds up `waiters`, the other ranks that have not finished, ascending."""

    culprit: RankStatus
    waiters: tuple[RankStatus, ...]
    limit_s: float
    is_silent: bool = False
    """`culprit` does not run at all."""

    @property
    def rank(self) -> int:
        return self.culprit.beat.rank

    def __str__(self) -> str:
        beat = self.culprit.beat
        state = f"is at {beat} and has shown no progress for {self.culprit.still_s:.0f} s"
        if self.is_silent:
            state = (
                f"was last known to be at {beat}, {self.culprit.silent_s:.0f} s ago, and its process has not run since "
                "(stopped, or in a call that holds the interpreter lock)"
            )
        elif beat.wait is not None:
            state += f": it waits at {beat.wait.what} for {_named(beat.wait.ranks)}, of whom nobody is at work any more"
        by = "".join(f"; rank {w.beat.rank} {what_it_does(w.beat)}" for w in self.waiters[:MAX_WAITERS_NAMED])
        more = len(self.waiters) - MAX_WAITERS_NAMED
        return (
            f"rank {beat.rank}{self._host} {state}; timeouts.no_progress_s, or the task's own limit in "
            f"timeouts.tasks, is {self.limit_s:.0f} s{by}" + (f"; and {more} more ranks wait" if more > 0 else "")
        )

    @property
    def _host(self) -> str:
        """Such as " on node7"; nothing where all are on one host, or its rank has not said yet."""
        hosts = {host_of(status.beat.process) for status in (self.culprit, *self.waiters)}
        host = host_of(self.culprit.beat.process)
        return f" on {host}" if host and len(hosts) > 1 else ""


@dataclass(frozen=True)
class Lost:
    """A rank that is not heard of any more, though others may get on without it."""

    culprit: RankStatus
    limit_s: float

    def __str__(self) -> str:
        beat = self.culprit.beat
        return (
            f"rank {beat.rank} on {host_of(beat.process)} was last known to be at {beat}, {self.culprit.silent_s:.0f} "
            "s ago, and has given no sign of life since (its host is down or cut off, or its process does not run); "
            f"timeouts.lost_s is {self.limit_s:.0f} s"
        )


MAX_WAITERS_NAMED = 4


def what_it_does(beat: Beat) -> str:
    """Such as "is at generate[3] (rollout)"."""
    if beat.wait is None:
        return f"is at {beat}"
    return f"is at {beat} and waits at {beat.wait.what} for {_named(beat.wait.ranks)}"


def find_stall(statuses: Iterable[RankStatus], limits: Timeouts) -> Stall | None:
    """The stall of the job, or None while there is none. `statuses` has every rank of the job.

    A rank that has just finished was at work: what the others say of themselves may be of before.
    """
    everybody = sorted(statuses, key=lambda status: status.beat.rank)
    unfinished = [status for status in everybody if not status.beat.finished]
    suspects = [status for status in unfinished if status.works] or unfinished
    if not suspects:
        return None
    newest = _newest_sequences(suspects)
    culprit = min(suspects, key=lambda status: (not is_silent(status, limits), *_innocence(status, newest)))
    limit = limit_s(culprit.beat, limits)
    others_stand_still = all(status.still_s > limit or _is_gone(status, limits) for status in everybody)
    if not (culprit.still_s > limit and others_stand_still):
        return None
    waiters = tuple(status for status in unfinished if status is not culprit)
    return Stall(culprit, waiters, limit, is_silent(culprit, limits))


def forbids_a_stall(status: RankStatus, limits: Timeouts) -> bool:
    """Whether there is none, whatever the other ranks say: this one got on within every limit."""
    shortest_s = min([limits.no_progress_s, *limits.tasks.values()])
    return status.still_s <= shortest_s and not _is_gone(status, limits)


def _is_gone(status: RankStatus, limits: Timeouts) -> bool:
    """Nothing more is to be expected of it, without its having finished."""
    return not status.beat.finished and is_silent(status, limits)


def limit_s(beat: Beat, limits: Timeouts) -> float:
    return limits.tasks.get(beat.task, limits.no_progress_s)


def is_silent(status: RankStatus, limits: Timeouts) -> bool:
    """Whether the rank does not run at all; known well before the end of any limit."""
    return status.silent_s > min(SILENT_S, limits.no_progress_s / 2, *(limit / 2 for limit in limits.tasks.values()))


def _innocence(status: RankStatus, newest: Mapping[str, int]) -> tuple[float, bool, bool, float, int]:
    """The least is to blame, of ranks that run. In turn: has not come to the task that others do already; is not inside
    a transfer, where it would rather wait for others; has not begun a collective that others are in; stopped first.
    """
    beat = status.beat
    is_behind = any(newest[group] > number for group, number in (beat.sequences or {}).items())
    return (
        math.inf if beat.position is None else beat.position,
        beat.communicates,
        not is_behind,
        -status.still_s,
        beat.rank,
    )


def _newest_sequences(statuses: Iterable[RankStatus]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for status in statuses:
        for group, number in (status.beat.sequences or {}).items():
            newest[group] = max(newest.get(group, number), number)
    return newest


def _named(ranks: Collection[int]) -> str:
    if not ranks:
        return "the others"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
