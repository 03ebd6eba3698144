"""Who holds up whom: from what all ranks say of themselves to the one rank that a stall is due to. No communication.

A rank depends on those it waits for, and on those with which it does a joint task and which have not done that yet. A
stall is a rank that has shown no progress for longer than the limit of its task while all that it depends on, in turn,
show none either: whoever waits for one that gets on, however slowly, waits on.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rltrain.cluster.heartbeat import Beat
from rltrain.config.schema import Timeouts

SILENT_S = 30.0
"""A rank without a beat for this long, or half of the shortest limit, does not run: stopped, or in a call that holds
Python's interpreter lock."""

Ranks = frozenset[int]


@dataclass(frozen=True)
class Standing:
    """A rank as one observer sees it, by the observer's own clock."""

    beat: Beat
    still_s: float
    """Since it last got on."""
    silent_s: float
    """Since its last beat."""
    excused_s: float = math.inf
    """Since somebody that it then depended on last got on: until that moment it may just have waited."""

    @property
    def works(self) -> bool:
        """Neither done nor waiting for anybody by name."""
        return not self.beat.finished and self.beat.wait is None


@dataclass(frozen=True)
class Stall:
    """`culprit` holds up `waiters`, ascending."""

    culprit: Standing
    waiters: tuple[Standing, ...]
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
            f"rank {beat.rank} {state}; timeouts.no_progress_s, or the task's own limit in "
            f"timeouts.tasks, is {self.limit_s:.0f} s{by}" + (f"; and {more} more ranks wait" if more > 0 else "")
        )


MAX_WAITERS_NAMED = 4


def what_it_does(beat: Beat) -> str:
    """Such as "is at generate[3] (rollout)"."""
    if beat.wait is None:
        return f"is at {beat}"
    return f"is at {beat} and waits at {beat.wait.what} for {_named(beat.wait.ranks)}"


def find_stall(
    standings: Mapping[int, Standing],
    members: Mapping[str, Collection[int]],
    limits: Timeouts,
    concerned: Iterable[int] | None = None,
) -> Stall | None:
    """The stall of any of the `concerned` ranks (None: of all), or None while there is none.

    `standings` has every rank of the job; `members` are the ranks by role.
    """
    dependence = _Dependence(standings, members)
    for rank in sorted(standings) if concerned is None else concerned:
        if standings[rank].works and not _is_over(standings[rank], limits):
            continue
        involved = [standings[other] for other in sorted(dependence.closure(rank))]
        if culprit := _culprit(involved, limits):
            waiters = dependence.waiters(culprit)
            return Stall(culprit, waiters, limit_s(culprit.beat, limits), is_silent(culprit, limits))
    return None


def limit_s(beat: Beat, limits: Timeouts) -> float:
    return limits.tasks.get(beat.task, limits.no_progress_s)


def is_silent(standing: Standing, limits: Timeouts) -> bool:
    """Whether the rank does not run at all; known well before the end of any limit."""
    return standing.silent_s > min(SILENT_S, limits.no_progress_s / 2, *(limit / 2 for limit in limits.tasks.values()))


def excuses(
    standings: Mapping[int, Standing], members: Mapping[str, Collection[int]], limits: Timeouts
) -> dict[int, float]:
    """Rank -> seconds since somebody that it depends on now last got on, for those that soon run out of their limit.

    To be kept: once the other has left what they did together, nothing else tells that this one had to wait for it.
    """
    dependence = _Dependence(standings, members)
    late = [r for r, s in standings.items() if s.works and s.still_s > limit_s(s.beat, limits) / 2]
    others = {rank: [standings[other] for other in dependence.closure(rank) - {rank}] for rank in late}
    return {rank: min((s.still_s for s in others[rank] if s.works), default=math.inf) for rank in late}


def _is_over(standing: Standing, limits: Timeouts) -> bool:
    return min(standing.still_s, standing.excused_s) > limit_s(standing.beat, limits)


def _culprit(involved: list[Standing], limits: Timeouts) -> Standing | None:
    """`involved` ranks depend on each other and on nobody else. The one to blame if none of them gets on."""
    unfinished = [standing for standing in involved if not standing.beat.finished]
    suspects = [standing for standing in unfinished if standing.works] or unfinished
    if not suspects or not all(_is_over(standing, limits) for standing in suspects):
        return None
    newest = _newest_sequences(suspects)
    return min(suspects, key=lambda standing: (not is_silent(standing, limits), *_innocence(standing, newest)))


def _innocence(standing: Standing, newest: Mapping[str, int]) -> tuple[float, bool, bool, float, int]:
    """The least is to blame, of ranks that run. In turn: has not come to the task that others do already; is not inside
    a transfer, where it would rather wait for others; has not begun a collective that others are in; stopped first.
    """
    beat = standing.beat
    is_behind = any(newest[group] > number for group, number in (beat.sequences or {}).items())
    return (
        math.inf if beat.position is None else beat.position,
        beat.communicates,
        not is_behind,
        -standing.still_s,
        beat.rank,
    )


def _newest_sequences(standings: Iterable[Standing]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for standing in standings:
        for group, number in (standing.beat.sequences or {}).items():
            newest[group] = max(newest.get(group, number), number)
    return newest


class _Dependence:
    """Which ranks a rank cannot go on without."""

    def __init__(self, standings: Mapping[int, Standing], members: Mapping[str, Collection[int]]) -> None:
        self.standings = standings
        self.members = members

    def closure(self, rank: int) -> set[int]:
        """`rank`, those that it depends on, those that they depend on, and so on."""
        found, ahead = {rank}, [rank]
        while ahead:
            new = self._direct(ahead.pop()) - found
            found |= new
            ahead += new
        return found

    def waiters(self, culprit: Standing) -> tuple[Standing, ...]:
        """The unfinished ranks that `culprit` holds up."""
        others = [standing for rank, standing in sorted(self.standings.items()) if standing is not culprit]
        return tuple(
            standing
            for standing in others
            if not standing.beat.finished and culprit.beat.rank in self.closure(standing.beat.rank)
        )

    def _direct(self, rank: int) -> set[int]:
        beat = self.standings[rank].beat
        if beat.finished:
            return set()
        if beat.wait is not None:
            return set(beat.wait.ranks) or set(self.standings) - {rank}
        joined = {member for role in beat.joined_by for member in self.members[role]}
        return {member for member in joined if not self._is_past(member, beat.position)}

    def _is_past(self, rank: int, position: int | None) -> bool:
        beat = self.standings[rank].beat
        return position is not None and beat.position is not None and beat.position > position


def _named(ranks: Collection[int]) -> str:
    if not ranks:
        return "the others"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
