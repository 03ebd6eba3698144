"""Telling the attempts of a job apart: torchrun restarts ranks beside a store that has what earlier ones left."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from rltrain.errors import StallError

POLL_S, POLL_SHARE = 0.01, 0.02
"""Between two looks of rank 0 at who has come: at least that long, and that share of how long it has waited."""


def join_attempt(store: dist.Store, rank: int, size: int, timeout_s: float) -> int:
    """The number of this attempt, the same on every rank that takes part in it, and on none of an earlier one.

    Nothing that torchrun tells a rank is: agents count their own restarts only. Rank 0 takes the next number and gives
    it to all who ask, until all have it. Whoever asks joins one list, so that one look of rank 0 is for all of them.
    StallError where some do not come. Collective over: all ranks.
    """
    if rank == 0:
        attempt = store.add("attempts", 1) - 1
        tickets = _admit(store, attempt, range(1, size), timeout_s)
        if attempt > 0:
            _clear(store, attempt, tickets)
        return attempt
    ticket = uuid.uuid4().hex
    store.append("asks", f"{ticket} ")  # type: ignore[attr-defined]
    try:
        store.wait([f"admitted/{ticket}"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise StallError(f"rank {rank} has waited {timeout_s:g} s for rank 0 to start: {error}") from error
    attempt = int(store.get(f"admitted/{ticket}"))
    store.append(f"joined/{attempt}", f"{rank} ")  # type: ignore[attr-defined]
    return attempt


def _admit(store: dist.Store, attempt: int, ranks: range, timeout_s: float) -> list[str]:
    """The tickets of all who were told the number. Some may be left from an earlier attempt: whoever is there confirms
    that it has got the number."""
    admitted: list[str] = []
    begin = time.monotonic()
    while missing := sorted({*ranks} - {*map(int, _listed(store, f"joined/{attempt}"))}):
        if tickets := _listed(store, "asks")[len(admitted) :]:
            store.multi_set([f"admitted/{ticket}" for ticket in tickets], [str(attempt)] * len(tickets))  # type: ignore[attr-defined]
            admitted += tickets
        waited_s = time.monotonic() - begin
        if waited_s > timeout_s:
            raise StallError(f"ranks {missing} have not started within {timeout_s:g} s")
        time.sleep(max(POLL_S, waited_s * POLL_SHARE))
    return admitted


def _clear(store: dist.Store, attempt: int, admitted: list[str]) -> None:
    """Delete what was asked and answered, unless another rank has asked meanwhile, and what is left of the attempts
    before the last one, of which no rank can be there any more. Stores of older versions of torch cannot list their
    keys: there that stays."""
    store.compare_set("asks", "".join(f"{ticket} " for ticket in admitted), "")
    for ticket in admitted:
        store.delete_key(f"admitted/{ticket}")
    keys = store.list_keys() if attempt > 1 and hasattr(store, "list_keys") else []
    for key in keys:
        name, _, rest = key.partition("/")
        number = rest if name == "joined" else name.removeprefix("attempt")
        if number.isdecimal() and int(number) < attempt - 1:
            store.delete_key(key)


def _listed(store: dist.Store, key: str) -> list[str]:
    """What ranks have appended to a list in the store."""
    return store.get(key).decode().split() if store.check([key]) else []
