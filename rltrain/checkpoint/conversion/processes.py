"""The processes that share one conversion: torchrun's, which meet in its store, or a single one."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

JOIN_TIMEOUT = timedelta(minutes=10)
POLL_S = 0.02


class Processes:
    """This process's number among those that work together. No process group is made: they only exchange bytes."""

    def __init__(self, rank: int = 0, count: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._meetings = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def meet(self) -> None:
        """Wait for all others, however long they work: where one fails, torchrun ends the rest.

        Collective over: all processes, like `gather`, in one order.
        """
        self.gather(b"")

    def gather(self, value: bytes) -> list[bytes]:
        """Every process's `value`, by rank."""
        if self._store is None:
            return [value]
        self._meetings += 1
        keys = [f"meeting {self._meetings} of {rank}" for rank in range(self.count)]
        self._store.set(keys[self.rank], value.hex())
        while not self._store.check(keys):  # its own way of waiting would hear no signal
            time.sleep(POLL_S)
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def add(self, counter: str, amount: int) -> int:
        """Add to a number that all share; the new value."""
        return amount if self._store is None else int(self._store.add(counter, amount))


def join_processes() -> Processes:
    """Those of torchrun, told by its environment; without it, a single one."""
    if "RANK" not in os.environ:
        return Processes()
    store, rank, count = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
    return Processes(rank, count, dist.PrefixStore("convert_checkpoint", store))
