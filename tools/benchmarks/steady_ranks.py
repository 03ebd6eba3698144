"""Ranks that have started, as their threads go on: beats, watchdogs' looks, and engines that look for weight syncs."""

import time
from collections.abc import Callable, Sequence

from starting_ranks import StartingJob, StartingRank

from rltrain.rollout.in_flight_sync import InFlightSync
from rltrain.schedule.order import WEIGHT_SYNC

Body = Callable[[], object]
"""A round of what one rank does."""


def steady(name: str, seconds: float, job: StartingJob, ranks: Sequence[StartingRank]) -> int:
    """Let `ranks` go on for so many seconds; how many rounds of a rank that was."""
    every_s, rounds = STEADY[name](job, ranks)
    begin, number = time.monotonic(), 0
    while rounds and (number < len(rounds) or time.monotonic() - begin < seconds):
        at = begin + number * every_s / len(rounds)
        time.sleep(max(at - time.monotonic(), 0.0))
        rounds[number % len(rounds)]()
        number += 1
    time.sleep(max(begin + seconds - time.monotonic(), 0.0))
    return number


def beat(job: StartingJob, ranks: Sequence[StartingRank]) -> tuple[float, list[Body]]:
    """Every rank beats, and looks whether the job ends; the first reads all beats."""
    for rank in ranks:
        rank.job_store.heartbeat.begin("update", "actor", 3, position=40)

    def once(rank: StartingRank) -> None:
        rank.job_store.heartbeat.publish()
        rank.watchdog._look()

    return ranks[0].job_store.heartbeat.interval_s, [lambda rank=rank: once(rank) for rank in ranks]  # type: ignore[misc]


def look_for_syncs(job: StartingJob, ranks: Sequence[StartingRank]) -> tuple[float, list[Body]]:
    """The first rank of every engine looks, as often as it may."""
    leaders = {of_engine[0] for of_engine in job.grids["rollout"].lists("tp")}
    looking = [_in_flight_sync(job, rank) for rank in ranks if rank.rank in leaders]

    def once(sync: InFlightSync) -> None:
        sync._last_poll = 0.0
        assert not sync.is_due()

    every_s = looking[0]._looks_every_s if looking else 1.0
    return every_s, [lambda sync=sync: once(sync) for sync in looking]  # type: ignore[misc]


def _in_flight_sync(job: StartingJob, rank: StartingRank) -> InFlightSync:
    sync = InFlightSync(
        job.order.syncs(WEIGHT_SYNC),
        rank.world.store,
        leader=rank.rank,
        rank=rank.rank,
        run=lambda position: None,
        num_engines=job.grids["rollout"].dp,
    )
    assert sync._next is not None
    sync.position = sync._next[1]
    return sync


STEADY: dict[str, Callable[[StartingJob, Sequence[StartingRank]], tuple[float, list[Body]]]] = {
    "heartbeats and watchdogs": beat,
    "engines look for a sync": look_for_syncs,
}
