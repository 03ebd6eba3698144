"""The end of ranks that have done their part: whoever others still need stays."""

import logging
import time

from rltrain.cluster.world import World
from rltrain.liveness.ending import Ending
from rltrain.liveness.job_store import JobStore
from rltrain.liveness.stopping import StopRequest

logger = logging.getLogger(__name__)

LEFT = "left"
"""Counts, in the store, the ranks that need it no more."""
LOOK_S = 0.1
LEAVES_WITHIN_S = 30.0
"""From where all ranks have done their part."""
NOTICED_WITHIN_S = 5.0
"""A torchrun agent looks once a second whether nodes have come."""


def await_signal_of_launcher(stop: StopRequest, world: World, stopped_by: str | None) -> None:
    """Where SIGTERM has stopped a job over several nodes: return once this rank has got it too, or seconds later.

    Agents of torchrun notice by themselves that a node has come, and then send SIGTERM to their own ranks. One whose
    ranks have ended well before takes the job for done, and closes it to the others.
    """
    if world.num_nodes > 1 and stopped_by == "SIGTERM":
        stop.heard.wait(NOTICED_WITHIN_S)


def leave_store(job_store: JobStore, ending: Ending) -> None:
    """The last call of a rank to the store. Rank 0, where it has the store itself, returns after all others, or ends
    with them where the job fails. Collective over: all ranks."""
    world, store = job_store.world, job_store.world.background
    if not world.has_store_in_rank_0:
        return
    if world.rank:
        store.add(LEFT, 1)
        return
    deadline: float | None = None
    while store.add(LEFT, 0) < world.size - 1:
        if ending.has_begun:
            ending.follow()
        if deadline is None:
            others = job_store.heartbeat.board.read(range(1, world.size)).values()
            deadline = time.monotonic() + LEAVES_WITHIN_S if all(beat.finished for beat in others) else None
        elif time.monotonic() > deadline:
            logger.warning("%d ranks that are done have not left", world.size - 1 - store.add(LEFT, 0))
            return
        time.sleep(LOOK_S)
