"""Copies of a training state that are made while training goes on, until something is about to change the state."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from rltrain.offload.memory_parts import MemoryPart


class LateCopies:
    """What is to be copied still, of a model on `device`. Whoever needs the copies, or is about to change or move what
    they are of, calls `settle`, from any thread: it makes those that are left, or waits for who makes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._left: deque[Callable[[], object]] = deque()
        self._waited_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None

    def begin(self) -> None:
        """What is issued on the device so far has written the state that is to be copied."""
        self.settle()
        if self._stream is not None:
            self._written = torch.cuda.current_stream(self._device).record_event()

    def add(self, part: MemoryPart, values: Tensor, first: int, count: int, into: Tensor | None) -> Tensor:
        """What will be a copy of `count` elements from `first` of `values`, a tensor of `part`; `into` where that is
        given. RuntimeError where the part was dropped."""
        part.require_kept()
        copy = torch.empty(count, dtype=values.dtype) if into is None else into
        self._left.append(partial(part.read, values, first, count, into=copy))
        return copy

    def settle(self) -> None:
        if not self._left:
            return
        begin = time.perf_counter()
        while self._make_one():
            pass
        if threading.get_ident() == self._owner:
            self._waited_s += time.perf_counter() - begin

    def take_waited_s(self) -> float:
        """Seconds since the last call that the thread which trains was in `settle`."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _make_one(self) -> bool:
        with self._lock:  # kept while it copies: who finds nothing left finds all copies made
            if not self._left:
                return False
            with self._beside():
                self._left[0]()
            self._left.popleft()
            return True

    def _beside(self) -> AbstractContextManager[None]:
        """On a stream of their own copies wait for nothing that is issued later."""
        if self._stream is None or self._written is None:
            return nullcontext()
        self._stream.wait_event(self._written)
        return torch.cuda.stream(self._stream)


class LateTensors(Mapping[str, Tensor]):
    """`tensors`, of which some are copies that `late` has yet to make: whoever takes one finds them made."""

    def __init__(self, tensors: Mapping[str, Tensor], late: LateCopies) -> None:
        self._tensors, self._late = tensors, late

    def __getitem__(self, name: str) -> Tensor:
        self._late.settle()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
