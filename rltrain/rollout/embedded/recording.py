"""Steps that are recorded once and replayed, which saves the host's work of launching each of their kernels."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes of a step, without executing it, what does the same on the same memory: a replay."""

_MAX_REPLAYS = 256
"""Each takes memory of its own for its list of kernels."""


class Recordings:
    """A step is named by all that shapes it. It runs as it is at first, which prepares what it needs of libraries and
    communicators; the second time it is recorded, and replayed from then on."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._addresses: tuple[int, ...] = ()
        self._seen: set[Hashable] = set()
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def expire(self, addresses: tuple[int, ...]) -> None:
        """Forget all recordings unless `addresses`, of the memory that they use, are as they were."""
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def run(self, name: Hashable, step: Callable[[], None]) -> None:
        """Do what `step` does."""
        if name not in self._seen:
            self._seen.add(name)
            step()
            return
        if name not in self._replays:
            if len(self._replays) == _MAX_REPLAYS:
                del self._replays[next(iter(self._replays))]
            self._replays[name] = self._record(step)
        self._replays[name]()

    def forget(self) -> None:
        """Drop the recordings. What was seen was prepared, and need not be again."""
        self._replays.clear()


def recorder(device: torch.device, group: dist.ProcessGroup | None) -> Record | None:
    """CUDA graphs; None on CPU, which launches nothing, and where gloo would take the host into every step."""
    if device.type != "cuda" or (group is not None and dist.get_backend(group) != "nccl"):
        return None
    return CudaGraphs()


class CudaGraphs:
    """Records CUDA graphs, which share the memory of their intermediate results: they never run at one time.

    A pool ends with its last graph, and torch refuses to record into one that has ended while anything still lies in
    it, as cuBLAS's workspace does. So the first graph of all, and the first after the last one is gone, gets a new one.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._graphs.add(graph)
        return graph.replay
