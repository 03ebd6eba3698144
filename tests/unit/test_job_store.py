"""What ranks leave for each other in the store."""

import time

import torch
import torch.distributed as dist

from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.unit.shared_store import on_ranks, open_store

NUM_RANKS = 3


def test_nobody_goes_on_from_a_meeting_before_all_have_come() -> None:
    def come(rank: int, store: dist.Store) -> int:
        job_store = JobStore(World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, timeout_s=10))
        job_store.heartbeat.publish()
        time.sleep(0.02 * rank)
        store.add("came", 1)
        job_store.meet("the end", NUM_RANKS, waiting_for="the end of the others")
        return store.add("came", 0)

    with open_store() as store:
        assert on_ranks(store, come, NUM_RANKS) == [NUM_RANKS] * NUM_RANKS
