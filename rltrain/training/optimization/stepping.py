"""The optimizer of one model's parameters, or of a part of them: AdamW or Muon, on the device or on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.offload.host_memory import HostTensors
from rltrain.training.optimization.adam import AdamRule, AdamTensors, adam_step
from rltrain.training.optimization.host_step import HostParameter, HostSteps
from rltrain.training.optimization.matrix_exchange import MatrixExchange, view_of
from rltrain.training.optimization.orthogonal import orthogonalize, update_scale
from rltrain.training.optimization.rounding import keep_rounded

ADAM_STATES = ("exp_avg", "exp_avg_sq")
MUON_STATES = ("momentum",)


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter, or this rank's shard of it.

    `key` is what a backend's `param_groups` name it by; it has the gradient, and is fp32. `weights`, flat, are what the
    model computes with. They are the key's own memory, or the key is a master of weights in another type.
    """

    key: Tensor
    weights: Tensor
    matrices: bool = False
    """Whether Muon moves it."""

    @property
    def has_master(self) -> bool:
        return self.weights.dtype != self.key.dtype


class SteppingOptimizer:
    """In the place of a torch optimizer, for as much of one as backends use: `param_groups` (the same dictionaries,
    with their lr and weight_decay), `state` and `step`. Gradients are whole and clipped when `step` is called, which
    writes the weights too, and may use up the gradients.

    With cpu_offload masters and states of as many parameters lie on the host for good, and there are none of them on
    the device: a key then keeps its shape and its gradient, and has no memory.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        slots: Sequence[Slot],
        settings: schema.Optimizer,
        device: torch.device,
        exchange: MatrixExchange | None = None,
    ) -> None:
        """`exchange` is of the slots with matrices, by their numbers."""
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
        """fp32: what the step works on, on the host or on the device."""
        return self._masters.get(key, key)

    def has_host_master(self, key: Tensor) -> bool:
        return key in self._masters

    def host_masters(self) -> list[Tensor]:
        """That lie on the host for good."""
        return list(self._masters.values())

    def host_states(self) -> list[Tensor]:
        """As the masters; they are there before the first step."""
        return [tensor for state in self._host_states.values() for tensor in state.values()]

    def make_states(self, num_steps: int) -> None:
        """Zero states, counted as after `num_steps`."""
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
        """Collective over: the exchange's group, where there is one."""
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
        """Momentum where it lies, in the place of the gradients; then whole matrices, and what they become."""
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
