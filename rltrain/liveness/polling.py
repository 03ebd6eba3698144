"""Waiting for something that has to be looked for, such as a key in the store."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rltrain.liveness.waiting import Waiter

POLL_S = 0.002

Found = TypeVar("Found")


def poll(
    waiter: Waiter,
    look: Callable[[], Found | None],
    what: str,
    ranks: Sequence[int],
    serve: Callable[[], None] | None = None,
) -> Found:
    """What `look` finds, as soon as it finds something; the other arguments and errors are those of Waiter.until."""
    found: list[Found] = []

    def arrived(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (result := look()) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        found.append(result)
        return True

    waiter.until(arrived, what, ranks, serve)
    return found[0]
