"""How a process of a failing job ends: with one message for all ranks, whoever finds the failure first."""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

MESSAGE_GRACE_S = 5.0
POLL_S = 0.05


def end_process(
    store: dist.Store, message: str, status: int, before_printing: Callable[[], None] = lambda: None
) -> NoReturn:
    """Print `message` if no other rank has printed one yet, and end this process at once, from any of its threads.

    Nothing is torn down: others may still use the process groups. The first process to end makes the launcher end all
    others: whoever prints calls `before_printing` first, and the others end after that.
    """
    if store.add("failures", 1) == 1:
        before_printing()
        print(f"\n{message}", file=sys.stderr, flush=True)
        store.set("failure_printed", "1")
    else:
        wait_briefly(store, ["failure_printed"], 2 * MESSAGE_GRACE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_quietly() -> NoReturn:
    """End this process at once and well, without tearing anything down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait_briefly(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Until all `keys` are in the store, but no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(POLL_S)
