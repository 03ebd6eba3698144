"""A real store in this process, and threads as ranks, each with its own connection."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

LIMIT_S = 20.0

Result = TypeVar("Result")


@contextmanager
def open_store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))


def on_ranks(store: dist.TCPStore, body: Callable[[int, dist.Store], Result], num_ranks: int) -> list[Result]:
    """Runs `body(rank, store)` for all ranks at the same time and returns the results by rank."""
    return at_the_same_time([store.clone() for _ in range(num_ranks)], body)  # type: ignore[attr-defined]


def at_the_same_time(stores: Sequence[dist.Store], body: Callable[[int, dist.Store], Result]) -> list[Result]:
    """Runs `body(rank, store)` for one rank per store at the same time and returns the results by rank."""
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(body, range(len(stores)), stores, timeout=LIMIT_S))


class Jobs:
    """Consecutive jobs, each with its own store on the same connections."""

    def __init__(self, store: dist.TCPStore, num_ranks: int) -> None:
        self.connections = [store.clone() for _ in range(num_ranks)]  # type: ignore[attr-defined]
        self.num_jobs = 0

    def start(self, num_ranks: int) -> list[dist.Store]:
        """Returns the store of the next job, one per rank."""
        self.num_jobs += 1
        return [dist.PrefixStore(f"job {self.num_jobs}", store) for store in self.connections[:num_ranks]]

    def run(self, body: Callable[[int, dist.Store], Result], num_ranks: int) -> list[Result]:
        """Runs `body(rank, store)` on all ranks of the next job and returns the results by rank."""
        return at_the_same_time(self.start(num_ranks), body)


class ShortPatience:
    """Waits like Waiter, and fails the test after a short time."""

    def until(
        self,
        arrived: Callable[[float], bool],
        what: str,
        ranks: Sequence[int],
        serve: Callable[[], None] | None = None,
    ) -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while not arrived(0.005):
            if serve:
                serve()
            assert time.monotonic() < deadline, f"timed out while waiting for {what} of ranks {ranks}"
