"""How fast an order could be executed: its tasks take what they took, and everything else takes no time."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from rltrain.runtime.placement import Placement
from rltrain.schedule.order import SYNC_EVALUATION, WEIGHT_SYNC, Entry, Order

Seconds = Callable[[Entry, int], float]
"""What a task took on a rank, without its waits for others."""


class Period(NamedTuple):
    """From the start of a task on its first rank to its end on its last one, in seconds from the start of the run."""

    start: float
    end: float


def timetable(order: Order, placement: Placement, seconds: Seconds) -> dict[Entry, Period]:
    """When each task would be done at the earliest.

    Transfers are free. A weight sync to engines waits for the actor, and an engine waits for it only at its place in
    the order, as with in-flight syncs; other tasks of several roles wait for all of their ranks. The order has posts
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
    """When all those have come that a task waits for."""
    if task.name in (WEIGHT_SYNC, SYNC_EVALUATION):
        return max(clock[rank] for rank in placement.ranks("actor"))
    if len(task.roles) > 1:
        return max(clock[rank] for role in task.roles for rank in placement.ranks(role))
    return 0.0
