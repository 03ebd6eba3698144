"""CUDA graphs on the CPU, with the rules of what they share: pools of memory, and communicators that they hold.

- A pool's handle cannot be used again once all its graphs are gone: torch refuses it while memory of the pool is in
  use, as that of cuBLAS's workspace is from the first capture on.
- A communicator is destroyed only once no recorded graph holds it: NCCL waits until then, for ever if need be.
"""

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

import torch

from tests.unit.recorded_steps import Recording


class RuleBrokenError(AssertionError):
    """What would hang, end the process, or go wrong on a GPU."""


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        self.recording.replay()


class GraphDevice:
    """What torch.cuda has for graphs. Each graph is noted in all of `holders`, of communicators that steps use."""

    CUDAGraph = Graph

    def __init__(self, holders: Sequence["WeakSet[Graph]"] = ()) -> None:
        self.holders = holders
        self.pools: dict[tuple[int, int], WeakSet[Graph]] = {}
        self._numbers = count(1)

    def install(self, monkeypatch: Any) -> None:
        for name in ("CUDAGraph", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self._numbers)

    @contextmanager
    def graph(self, graph: Graph, pool: tuple[int, int], capture_error_mode: str) -> Iterator[None]:
        if pool in self.pools and not self.pools[pool]:
            raise RuleBrokenError(f"pool {pool} is used again after all its graphs are gone: torch refuses it")
        self.pools.setdefault(pool, WeakSet()).add(graph)
        with graph.recording:
            yield
        graph.recording.undo()
        for holders in self.holders:
            holders.add(graph)


def expect_unheld(communicator: str, holders: Sized) -> None:
    """To be called where it is destroyed."""
    if len(holders):
        raise RuleBrokenError(
            f"{communicator} is destroyed while {len(holders)} recorded graphs hold it: NCCL would wait until they are "
            "gone"
        )
