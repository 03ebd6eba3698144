"""Telling the attempts of a job apart: torchrun restarts ranks beside a store that has all that earlier ones left."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from rltrain.errors import StallError

POLL_S = 0.01


def join_attempt(store: dist.Store, rank: int, size: int, timeout_s: float) -> int:
    """The number of this attempt, the same on every rank that takes part in it, and on none of an earlier one.

    Nothing that torchrun tells a rank is: agents count their own restarts only. Rank 0 takes the next number and gives
    it to all who ask, until all have it. StallError where some do not come. Collective over: all ranks.
    """
    if rank == 0:
        attempt = store.add("attempts", 1) - 1
        _admit(store, attempt, range(1, size), timeout_s)
        return attempt
    ticket = uuid.uuid4().hex
    store.set(f"asks/{rank}", ticket)
    try:
        store.wait([f"admitted/{ticket}"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise StallError(f"rank {rank} has waited {timeout_s:g} s for rank 0 to start: {error}") from error
    attempt = int(store.get(f"admitted/{ticket}"))
    store.set(f"joined/{attempt}/{rank}", "")
    return attempt


def _admit(store: dist.Store, attempt: int, ranks: range, timeout_s: float) -> None:
    """Tickets may be left from an earlier attempt: whoever is there confirms that it has got the number."""
    missing, admitted = set(ranks), set[str]()
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if store.check([f"asks/{rank}"]) and (ticket := store.get(f"asks/{rank}").decode()) not in admitted:
                store.set(f"admitted/{ticket}", str(attempt))
                admitted.add(ticket)
        missing = {rank for rank in missing if not store.check([f"joined/{attempt}/{rank}"])}
        if missing and time.monotonic() > deadline:
            raise StallError(f"ranks {sorted(missing)} have not started within {timeout_s:g} s")
        time.sleep(POLL_S if missing else 0)
