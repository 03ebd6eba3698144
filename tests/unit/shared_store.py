"""A real store in this process, and threads that stand for ranks, each with a connection of its own."""

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
    yield dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))


def on_ranks(store: dist.TCPStore, body: Callable[[int, dist.Store], Result], num_ranks: int) -> list[Result]:
    """`body(rank, store)` of all ranks at the same time; what each returned, by rank."""
    stores = [store.clone() for _ in range(num_ranks)]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(body, range(num_ranks), stores, timeout=LIMIT_S))


class ShortPatience:
    """Waits as Patience does, and fails the test where that takes long."""

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
            assert time.monotonic() < deadline, f"waited in vain for {what} of ranks {ranks}"
