"""Waiting for something that has to be looked for, such as a key in the store."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rltrain.liveness.waiting import Waiter

POLL_S = 0.002
LOOKS_PER_S = 2_000
"""Of all ranks together that look into the store for something: a sixteenth of one server's processor."""

Found = TypeVar("Found")


def poll_s(num_looking: int) -> float:
    """Between two looks of one of so many ranks that may look at the same time."""
    return max(POLL_S, num_looking / LOOKS_PER_S)


def poll(
    waiter: Waiter,
    look: Callable[[], Found | None],
    what: str,
    ranks: Sequence[int],
    serve: Callable[[], None] | None = None,
    every_s: float = POLL_S,
) -> Found:
    """What `look` finds, as soon as it finds something. It is called every `every_s`: `poll_s` where it asks the store.
    The other arguments and errors are those of Waiter.until."""
    found: list[Found] = []
    next_look = 0.0

    def arrived(seconds: float) -> bool:
        nonlocal next_look
        deadline = time.monotonic() + seconds
        while True:
            if time.monotonic() >= next_look:
                if (result := look()) is not None:
                    found.append(result)
                    return True
                next_look = time.monotonic() + every_s
            if time.monotonic() >= deadline:
                return False
            time.sleep(max(min(next_look, deadline) - time.monotonic(), 0))

    waiter.until(arrived, what, ranks, serve)
    return found[0]
