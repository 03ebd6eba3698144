"""AdamW and Muon for one model's parameters, on the device or on the host."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.offload.host_memory import HostTensors
from rltrain.training.matrix_exchange import MatrixExchange, view_of

# Stochastic rounding of fp32 to bf16 without a random generator. Its mean error is zero.

DROPPED_BITS = 16
"""Number of bits of fp32 missing in bf16."""
LOW_BITS = (1 << DROPPED_BITS) - 1
STEP_FACTOR, VALUE_FACTOR, MIX_FACTORS = 0x9E3779B1, 0x27D4EB2F, (0x2C1B3C6D, 0x297A2D39)
"""Odd 32-bit numbers with about as many ones as zeros."""


def keep_rounded(kept: Tensor, values: Tensor, weights: Tensor, step: int, salt: int) -> None:
    """Writes fp32 `values` into `kept`, bf16, rounding each to one of its two neighbours. The nearer one is likelier.

    With rounding to the nearest, a moment could never decay by less than half of bf16's spacing (2**-9) per step. The
    second moment would be stuck for a beta2 above 0.998.

    The choice is a hash of the value, its weight, `step` and `salt`. So a run repeats and resumes bit for bit in every
    layout with the same numbers. `weights` only distinguish elements, so they may have any values. All tensors have one
    shape.
    """
    bits = values.view(torch.int32)
    noise = bits * _signed(VALUE_FACTOR)
    noise ^= weights.view(torch.int32)
    noise += _signed((step * STEP_FACTOR + salt) & 0xFFFFFFFF)
    for factor in MIX_FACTORS:
        noise ^= noise >> DROPPED_BITS - 1
        noise *= _signed(factor)
    noise >>= DROPPED_BITS
    noise &= LOW_BITS
    noise += bits
    noise &= ~LOW_BITS
    kept.copy_(noise.view(torch.float32))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


# AdamW (Loshchilov and Hutter 2019, algorithm 2) in fp32, with moments stored in fp32 or bf16.

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of elements with fp32 copies of bf16 moments at a time. On a CPU they fit into the cache: 1 << 16 is six times
as fast as 1 << 22. On a GPU they are enough for a kernel launch."""


@dataclass(frozen=True)
class AdamRule:
    """The numbers of one step for some parameters."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Step number, from 1."""


@dataclass(frozen=True, eq=False)
class AdamTensors:
    """The tensors of a parameter or a range of it: flat, of one size, on one device. Moments are fp32 or bf16."""

    weights: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def cut(self, size: int) -> Iterator["AdamTensors"]:
        """Yields ranges of at most `size` elements."""
        parts = (tensor.split(size) for tensor in (self.weights, self.gradient, self.exp_avg, self.exp_avg_sq))
        yield from map(AdamTensors, *parts)


def adam_step(parameters: Sequence[AdamTensors], rule: AdamRule) -> None:
    """Updates weights and moments by one step. The fp32 gradients are unchanged."""
    parameters = [one for one in parameters if one.weights.numel()]
    if not parameters:
        return
    in_fp32 = [one for one in parameters if one.exp_avg.dtype == torch.float32]
    _fused(in_fp32, rule)
    for one in parameters:
        if one.exp_avg.dtype == torch.float32:
            continue
        for chunk in one.cut(CHUNK_ELEMENTS[one.weights.device.type]):
            wide = AdamTensors(chunk.weights, chunk.gradient, chunk.exp_avg.float(), chunk.exp_avg_sq.float())
            _fused([wide], rule)
            keep_rounded(chunk.exp_avg, wide.exp_avg, chunk.weights, rule.step, salt=1)
            keep_rounded(chunk.exp_avg_sq, wide.exp_avg_sq, chunk.weights, rule.step, salt=2)


def _fused(parameters: Sequence[AdamTensors], rule: AdamRule) -> None:
    """Calls the kernel of torch.optim.AdamW(fused=True), for the same numbers."""
    if not parameters:
        return
    step = torch.tensor(float(rule.step), device=parameters[0].weights.device)
    torch._fused_adamw_(
        [one.weights for one in parameters],
        [one.gradient for one in parameters],
        [one.exp_avg for one in parameters],
        [one.exp_avg_sq for one in parameters],
        [],
        [step] * len(parameters),
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )


# Adam on the host for weights on a device. Copies in both directions overlap with the computation.

BUCKET_ELEMENTS = 1 << 24
"""Number of elements in transfer at a time, per direction."""
DEPTH = 2
"""Number of buckets on the host at once: the current one and the next one."""

Wait = Callable[[], None]


@dataclass(frozen=True, eq=False)
class HostParameter:
    """The tensors of a step on the host. `weights` and `gradient` are flat on the device, the others flat on the host.

    `master` is fp32. None: the weights are fp32 themselves, and they are copied to the host too.
    """

    weights: Tensor
    gradient: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rule: AdamRule

    def cut(self, size: int) -> Iterator["HostParameter"]:
        """Yields ranges of at most `size` elements."""
        for first in range(0, self.weights.numel(), size):
            of = slice(first, first + size)
            master = None if self.master is None else self.master[of]
            yield HostParameter(
                self.weights[of], self.gradient[of], master, self.exp_avg[of], self.exp_avg_sq[of], self.rule
            )


class Copies:
    """Copies between host and device. In this class the device is a CPU, and copies are complete on return.
    CudaHostCopies makes them asynchronous."""

    def begin(self) -> None:
        """Makes the next copies wait for all earlier work."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        """Copies each source to its destination, for pairs of (destination, source). Returns a function to wait until
        all of them are complete. With CUDA, host tensors must be pinned, or the copies are not asynchronous."""
        for destination, source in pairs:
            destination.copy_(source, non_blocking=True)
        return lambda: None

    def end(self) -> None:
        """Makes later work wait for the copies."""


class CudaHostCopies(Copies):
    """Copies on a separate CUDA stream."""

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
    """Optimizer steps on the host, bucket by bucket, in permanent staging memory.

    The gradients of one bucket are copied down and the weights of another up, each on its own stream, while a third one
    is computed. So both directions of the link are in use.
    """

    def __init__(self, device: torch.device, *, bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self._bucket_elements = bucket_elements
        copies = CudaHostCopies if device.type == "cuda" else lambda device: Copies()
        self._down, self._up = copies(device), copies(device)
        names = [f"{what} {slot}" for what in ("gradient", "weights") for slot in range(DEPTH)]
        like = torch.empty(bucket_elements, device="meta")
        self.staging = HostTensors(dict.fromkeys(names, like), device).tensors
        """Staging buffers, fp32. Weights of a smaller type use a part of them."""
        self._threads = _threads_of_a_rank() if device.type == "cuda" else None

    def run(self, parameters: Iterable[HostParameter]) -> None:
        """Makes one step for each parameter. Later work on the device waits for it."""
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
                        gone[number]()  # the slot of the arriving weights must have been sent
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
        """Computes a bucket. `await_sent` waits until the previous bucket in the same staging slot was sent."""
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
        """Yields each parameter with its gradients and its weights on the host."""
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
    """Returns this rank's share of the machine's processors. torchrun's default is one thread per rank."""
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


# Muon's update: orthogonalized momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic. Five passes bring singular values from about 0.02 up to between 0.7 and 1.2."""
EPS = 1e-7
UPDATE_RMS = 0.2
"""Approximate root mean square of AdamW's updates (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""


def update_scale(rows: int, columns: int) -> float:
    """Returns the factor for an orthogonal matrix to get elements with the root mean square UPDATE_RMS, for every
    shape.

    AdamW's learning rate and weight decay then fit Muon too (equation 4 of the same paper).
    """
    return UPDATE_RMS * sqrt(max(rows, columns))


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Returns matrices [count, rows, columns] with the singular vectors of `matrices` and singular values near 1."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norms = torch.linalg.matrix_norm(x.float(), keepdim=True)
    x = (x / (norms + EPS)).to(matrices.dtype)
    for _ in range(steps):
        squared = x @ x.mT
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x.mT if is_tall else x


# The optimizer of a model's parameters or a part of them.

ADAM_STATES = ("exp_avg", "exp_avg_sq")
MUON_STATES = ("momentum",)


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter, or this rank's shard of it.

    `key` identifies it in a backend's `param_groups`. It is fp32 and has the gradient. `weights`, flat, are the weights
    of the model's computation. They share the key's memory, or the key is a master copy of weights of another type.
    """

    key: Tensor
    weights: Tensor
    matrices: bool = False
    """Whether Muon updates it."""

    @property
    def has_master(self) -> bool:
        return self.weights.dtype != self.key.dtype


class SteppingOptimizer:
    """A replacement of a torch optimizer with the parts needed by backends: `param_groups`, `state` and `step`.

    `param_groups` are the same dictionaries, with their lr and weight_decay. Gradients must be whole and clipped before
    `step`. It also writes the weights, and may overwrite the gradients.

    With cpu_offload, this share of masters and states is always on the host. Their keys keep shape and gradient on the
    device but have no memory.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        slots: Sequence[Slot],
        settings: schema.Optimizer,
        device: torch.device,
        exchange: MatrixExchange | None = None,
    ) -> None:
        """Takes an `exchange` for the slots with matrices, by their numbers."""
        self.param_groups, self.settings, self._device = param_groups, settings, device
        self._slots = slots
        self._group_of = {key: group for group in param_groups for key in group["params"]}
        self._exchange = exchange
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.num_steps = 0
        self.moments_dtype = getattr(torch, settings.moments_dtype)
        self._host = self._on_host()
        self._masters: dict[Tensor, Tensor] = {}
        self._host_states: dict[Tensor, dict[str, Tensor]] = {}
        self._host_steps: HostSteps | None = None
        if self._host:
            self._move_to_host()

    def master(self, key: Tensor) -> Tensor:
        """Returns the fp32 weights of the step, on the host or on the device."""
        return self._masters.get(key, key)

    def has_host_master(self, key: Tensor) -> bool:
        return key in self._masters

    def host_masters(self) -> list[Tensor]:
        """Returns the masters with a permanent place on the host."""
        return list(self._masters.values())

    def host_states(self) -> list[Tensor]:
        """Returns the states with a permanent place on the host. They exist before the first step."""
        return [tensor for state in self._host_states.values() for tensor in state.values()]

    def make_states(self, num_steps: int) -> None:
        """Makes zero states with a step count of `num_steps`."""
        self.num_steps = num_steps
        for slot in self._slots:
            if slot.key in self._host_states:
                self.state[slot.key] = self._host_states[slot.key]
                continue
            names = MUON_STATES if slot.matrices else ADAM_STATES
            like = {"dtype": self.moments_dtype, "device": self._device}
            self.state[slot.key] = {name: torch.zeros(slot.key.shape, **like) for name in names}

    @torch.no_grad()
    def step(self) -> None:
        """Makes one step. Collective over: the exchange's group, if there is an exchange."""
        if not self.state:
            self.make_states(0)
        self.num_steps += 1
        self._adam([slot for slot in self._slots if not slot.matrices and slot.key not in self._host])
        if self._exchange is not None:
            self._muon(self._exchange)
        if self._host_steps is not None:
            self._host_steps.run([self._host_parameter(slot) for slot in self._slots if slot.key in self._host])
        for slot in self._slots:
            if slot.has_master and slot.key not in self._host:
                slot.weights.copy_(_flat(slot.key))

    def _adam(self, slots: Sequence[Slot]) -> None:
        for group in self.param_groups:
            keys = [slot.key for slot in slots if self._group_of[slot.key] is group]
            adam_step([self._adam_tensors(key) for key in keys], self._rule(group))

    def _adam_tensors(self, key: Tensor) -> AdamTensors:
        state = self.state[key]
        return AdamTensors(_flat(key), _gradient(key), _flat(state["exp_avg"]), _flat(state["exp_avg_sq"]))

    def _rule(self, group: dict[str, Any]) -> AdamRule:
        settings = self.settings
        return AdamRule(
            float(group["lr"]),
            settings.beta1,
            settings.beta2,
            settings.eps,
            float(group["weight_decay"]),
            self.num_steps,
        )

    def _muon(self, exchange: MatrixExchange) -> None:
        """Adds momentum to local shards, into the gradients' memory. Then it exchanges, orthogonalizes and applies
        whole matrices."""
        settings = self.settings.muon
        for slot in self._slots:
            if slot.matrices:
                self._add_momentum(slot.key)

        def orthogonal(matrices: Tensor) -> Tensor:
            dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
            scale = update_scale(*matrices.shape[-2:])
            return orthogonalize(matrices.to(dtype), settings.newton_schulz_steps).float() * scale

        def apply(box: np.void, update: Tensor) -> None:
            key = self._slots[int(box["parameter"])].key
            group = self._group_of[key]
            weights = view_of(_flat(key), box)
            weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

        exchange.map(lambda number: _gradient(self._slots[number].key), apply, orthogonal, self._device)

    def _add_momentum(self, key: Tensor) -> None:
        beta, kept, gradient = self.settings.muon.momentum, _flat(self.state[key]["momentum"]), _gradient(key)
        momentum = kept if kept.dtype == torch.float32 else kept.float()
        momentum.mul_(beta).add_(gradient)
        if kept.dtype != torch.float32:
            keep_rounded(kept, momentum, _flat(key), self.num_steps, salt=3)
        if self.settings.muon.nesterov:
            gradient.add_(momentum, alpha=beta)
        else:
            gradient.copy_(momentum)

    def _on_host(self) -> set[Tensor]:
        share = float(self.settings.cpu_offload)
        total, found, count = sum(slot.key.numel() for slot in self._slots), set[Tensor](), 0
        for slot in self._slots:
            if count >= share * total:
                break
            found.add(slot.key)
            count += slot.key.numel()
        return found

    def _move_to_host(self) -> None:
        like: dict[str, Tensor] = {}
        slots = [slot for slot in self._slots if slot.key in self._host]
        for number, slot in enumerate(slots):
            if slot.has_master:
                like[f"master {number}"] = torch.empty(slot.key.shape, device="meta")
            for name in ADAM_STATES:
                like[f"{name} {number}"] = torch.empty(slot.key.shape, dtype=self.moments_dtype, device="meta")
        found = HostTensors(like, self._device).tensors
        for number, slot in enumerate(slots):
            if slot.has_master:
                self._masters[slot.key] = found[f"master {number}"].copy_(slot.key.detach())
            self._host_states[slot.key] = {name: found[f"{name} {number}"] for name in ADAM_STATES}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for key in self._masters:
            key.untyped_storage().resize_(0)
        self._host_steps = HostSteps(self._device)

    def _host_parameter(self, slot: Slot) -> HostParameter:
        state = self._host_states[slot.key]
        master = self._masters.get(slot.key)
        return HostParameter(
            slot.weights,
            _gradient(slot.key),
            None if master is None else _flat(master),
            _flat(state["exp_avg"]),
            _flat(state["exp_avg_sq"]),
            self._rule(self._group_of[slot.key]),
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _gradient(key: Tensor) -> Tensor:
    assert key.grad is not None, "every parameter has a gradient in every step"
    return key.grad.view(-1)


# The learning rate per optimizer step.


def learning_rate(settings: schema.Optimizer, update: int, total_updates: int) -> float:
    """Returns the learning rate of optimizer step `update` (from 0) of `total_updates`. It rises linearly and reaches
    `settings.lr` with the last warm-up step. Then it is constant or falls. It would reach `settings.min_lr` one step
    after the last."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    remaining = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * remaining
