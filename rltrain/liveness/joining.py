"""Joining the job: the first thing that a rank does, which ends within a limit or with a message."""

import os
import platform

import torch.distributed as dist

from rltrain.cluster.world import World, join_world
from rltrain.errors import StallError
from rltrain.liveness.ending import end_alone, first_line
from rltrain.liveness.store_watch import StoreWatch


def join_within(timeout_s: float) -> World:
    """The world, once all ranks have come. Where some do not within `timeout_s`, or the store does not answer within
    twice that, the process ends. Collective over: all ranks."""
    rank = int(os.environ["RANK"])
    watch = StoreWatch(rank, 2 * timeout_s, "twice the limit of the start", lambda: "is at joining the job")
    watch.start()
    try:
        return join_world(timeout_s)
    except (StallError, dist.DistError) as error:
        end_alone(f"rank {rank} on {platform.node()} is at joining the job, which failed: {first_line(error)}")
    finally:
        watch.stop()
