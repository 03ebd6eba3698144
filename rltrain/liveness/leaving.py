"""The end of ranks that have done their part: whoever others still need stays."""

import logging
import math
import time

from rltrain.cluster.world import World
from rltrain.errors import StallError
from rltrain.liveness.ending import Ending
from rltrain.liveness.job_store import JobStore
from rltrain.liveness.polling import poll_s
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
    with them where the job fails: also where they are lost. Collective over: all ranks."""
    world, store = job_store.world, job_store.world.background
    if not world.has_store_in_rank_0:
        return
    if world.rank:
        store.add(LEFT, 1)
        return
    others, deadline = range(1, world.size), math.inf
    while (num_left := store.add(LEFT, 0)) < len(others):
        if ending.has_begun:
            ending.follow()
        if gone := job_store.observer.gone(others):
            ending.by(StallError(f"ranks {gone} were lost before their end"))
        if time.monotonic() > deadline:
            logger.warning("%d ranks that are done have not left", len(others) - num_left)
            return
        statuses = job_store.observer.look(others).values()
        if deadline == math.inf and all(status.beat.finished for status in statuses):
            deadline = time.monotonic() + LEAVES_WITHIN_S
        time.sleep(max(LOOK_S, poll_s(world.size)))
