"""Records and replays steps on the CPU under the rules of CUDA graphs: a memory pool ends with its last graph."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

READS_BACK = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
FROM_HOST = {torch.ops.aten.lift_fresh.default}
"""Operators forbidden in a capture: it can neither wait for the device nor read later values of the host."""


class Recording(TorchDispatchMode):
    """Runs and records the operators inside it. `replay` runs them again on the same outside tensors, with the recorded
    numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert operator not in READS_BACK | FROM_HOST, f"{operator} cannot be captured"
        kwargs = kwargs or {}
        for number, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensor = args[number] if number < len(args) else kwargs[argument.name]
                self._overwritten.append((tensor, tensor.clone()))
        result = operator(*args, **kwargs)
        self._calls.append((operator, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Restores the overwritten tensors. On a GPU, capturing executes nothing."""
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        self._overwritten.clear()

    def replay(self) -> None:
        results: dict[int, Tensor] = {}
        for operator, args, kwargs, recorded in self._calls:
            args, kwargs = tree_map_only(Tensor, lambda tensor: results.get(id(tensor), tensor), (args, kwargs))
            computed = operator(*args, **kwargs)
            if isinstance(recorded, Tensor):
                recorded, computed = (recorded,), (computed,)
            for before, now in zip(recorded, computed, strict=True):
                results[id(before)] = now


class Recorder:
    """A `Record` that counts the calls of itself and of its replays."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        recording = Recording()
        with recording:
            step()
        recording.undo()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            recording.replay()

        return replay


class RuleBrokenError(AssertionError):
    """A step would hang, end the process, or go wrong on a GPU."""


class Graph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        self.recording.replay()


class GraphDevice:
    """Replaces the graph functions of torch.cuda. Each graph is added to all of `holders`, one set per communicator."""

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
    """Raises RuleBrokenError if graphs still hold the communicator. Call this before destroying it."""
    if len(holders):
        raise RuleBrokenError(
            f"{communicator} is destroyed while {len(holders)} recorded graphs hold it: NCCL would wait until they are "
            "gone"
        )
