"""Adam on the host for weights on a device: gradients come down and weights go up while it computes on others."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.offload.host_memory import HostTensors
from rltrain.training.optimization.adam import AdamRule, AdamTensors, adam_step

BUCKET_ELEMENTS = 1 << 24
"""That are on their way at a time, in one direction."""
DEPTH = 2
"""Buckets on the host at once: the one that is computed on, and the next one."""

Wait = Callable[[], None]


@dataclass(frozen=True, eq=False)
class HostParameter:
    """What a step on the host works on. `weights` and `gradient` are flat on the device, the others flat on the host.

    `master` is fp32; None where the weights are fp32 themselves, which then come down too.
    """

    weights: Tensor
    gradient: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rule: AdamRule

    def cut(self, size: int) -> Iterator["HostParameter"]:
        """In ranges of at most `size` elements."""
        for first in range(0, self.weights.numel(), size):
            of = slice(first, first + size)
            master = None if self.master is None else self.master[of]
            yield HostParameter(
                self.weights[of], self.gradient[of], master, self.exp_avg[of], self.exp_avg_sq[of], self.rule
            )


class Copies:
    """Copies between host and device that are done when they return: the device is the host."""

    def begin(self) -> None:
        """What was asked for before comes before the copies that follow."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        """Copy every (destination, source), pinned on the host; what has the host wait until that is done."""
        for destination, source in pairs:
            destination.copy_(source, non_blocking=True)
        return lambda: None

    def end(self) -> None:
        """Have what is asked for from here on come after the copies."""


class CudaCopies(Copies):
    """On a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        with torch.cuda.stream(self._stream):
            super().copy(pairs)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        return event.synchronize

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostSteps:
    """Steps on the host by buckets, in memory that is kept: gradients of one come down and weights of one go up, each
    on a stream of its own, while a third is computed on. Both directions of the link are in use."""

    def __init__(self, device: torch.device, *, bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self._bucket_elements = bucket_elements
        copies = CudaCopies if device.type == "cuda" else lambda device: Copies()
        self._down, self._up = copies(device), copies(device)
        names = [f"{what} {slot}" for what in ("gradient", "weights") for slot in range(DEPTH)]
        like = torch.empty(bucket_elements, device="meta")
        self.staging = HostTensors(dict.fromkeys(names, like), device).tensors
        """fp32; weights of another type take less of it."""
        self._threads = _threads_of_a_rank() if device.type == "cuda" else None

    def run(self, parameters: Iterable[HostParameter]) -> None:
        """One step of each; later work on the device comes after it."""
        buckets = list(_buckets(parameters, self._bucket_elements))
        self._down.begin()
        self._up.begin()
        arrived = [self._bring(bucket, number) for number, bucket in enumerate(buckets[:DEPTH])]
        gone: list[Wait] = []
        with _threads(self._threads):
            for number, bucket in enumerate(buckets):
                arrived[number]()
                self._compute(bucket, number, (lambda: None) if number < DEPTH else gone[number - DEPTH])
                gone.append(self._send(bucket, number))
                if number + DEPTH < len(buckets):
                    if any(one.master is None for one in buckets[number + DEPTH]):
                        gone[number]()  # weights come down to where others go up from
                    arrived.append(self._bring(buckets[number + DEPTH], number + DEPTH))
        self._up.end()

    def _bring(self, bucket: Sequence[HostParameter], number: int) -> Wait:
        pairs = []
        for one, gradient, weights in self._staged(bucket, number):
            pairs.append((gradient, one.gradient))
            if one.master is None:
                pairs.append((weights, one.weights))
        return self._down.copy(pairs)

    def _compute(self, bucket: Sequence[HostParameter], number: int, await_sent: Wait) -> None:
        """`await_sent` waits for the weights of the bucket before that lay in the same place."""
        for one, gradient, weights in self._staged(bucket, number):
            master = weights if one.master is None else one.master
            adam_step([AdamTensors(master, gradient, one.exp_avg, one.exp_avg_sq)], one.rule)
        await_sent()
        for one, _, weights in self._staged(bucket, number):
            if one.master is not None:
                weights.copy_(one.master)

    def _send(self, bucket: Sequence[HostParameter], number: int) -> Wait:
        return self._up.copy((one.weights, weights) for one, _, weights in self._staged(bucket, number))

    def _staged(self, bucket: Sequence[HostParameter], number: int) -> Iterator[tuple[HostParameter, Tensor, Tensor]]:
        """With the gradients and the weights of each on the host."""
        slot, first = number % DEPTH, 0
        for one in bucket:
            count = one.weights.numel()
            weights = self.staging[f"weights {slot}"][first : first + count].view(one.weights.dtype)[:count]
            yield one, self.staging[f"gradient {slot}"][first : first + count], weights
            first += count


def _buckets(parameters: Iterable[HostParameter], size: int) -> Iterator[list[HostParameter]]:
    bucket: list[HostParameter] = []
    room = size
    for part in (part for one in parameters for part in one.cut(size)):
        if part.weights.numel() > room:
            yield bucket
            bucket, room = [], size
        bucket.append(part)
        room -= part.weights.numel()
    if bucket:
        yield bucket


def _threads_of_a_rank() -> int:
    """Of the machine's processors, this rank's share: torchrun has ranks compute with one."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
