"""What layers keep for backward, on the host from a layer's forward until just before its backward."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rltrain.offload.device_memory import DeviceMemory, device_memory

LEAST_BYTES = 1 << 20
"""Of a tensor that is worth a copy of its own."""
AHEAD = 2
"""Layers whose tensors the device still has while others are computed: their copies have as long to finish."""

Key = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


class Kept:
    """One tensor of a layer: on the host, and on the device while it is on its way or asked for."""

    def __init__(self, tensor: Tensor, layer: "LayerTensors") -> None:
        self.layer = layer
        self.on_device: Tensor | None = tensor.detach()
        self.uses = 0
        """Times that backward will ask for it."""
        self._device = tensor.device
        self._host: Tensor | None = None

    def save(self, memory: DeviceMemory) -> None:
        """Begin to copy it to the host."""
        assert self.on_device is not None
        self._host = torch.empty_like(self.on_device, device="cpu", pin_memory=memory.pins)
        with memory.copies():
            self._host.copy_(self.on_device, non_blocking=True)

    def fetch(self, memory: DeviceMemory) -> None:
        """Begin to bring it back, into memory of the stream that computes."""
        if self.on_device is None:
            assert self._host is not None
            self.on_device = memory_like(self._host, self._device)
            with memory.copies():  # behind what was asked for before: the memory may have been another tensor's
                self.on_device.copy_(self._host, non_blocking=True)

    def take(self) -> Tensor:
        """It, on the device, which has it no longer than those that ask for it once it has its uses behind it."""
        found = self.on_device
        assert found is not None
        self.uses -= 1
        if self.uses <= 0 and self._host is not None:
            self.on_device = None
        return found


class LayerTensors:
    """Those of one layer in one forward pass. They live as long as autograd may ask for them.

    `stays`: they are not copied; only that backward comes to them is of interest.
    """

    def __init__(self, before: "LayerTensors | None", memory: DeviceMemory, *, stays: bool) -> None:
        self._before, self._memory, self._stays = before, memory, stays
        self._on_device: dict[Key, Kept] = {}
        """Until they leave: the same tensor may be kept by several operations."""
        self._all: list[weakref.ref[Kept]] = []
        self._arrive: Callable[[], None] | None = (lambda: None) if stays else None

    def keep(self, tensor: Tensor) -> Kept:
        key = _key(tensor)
        kept = self._on_device.get(key)
        if kept is None:
            kept = self._on_device[key] = Kept(tensor, self)
            if not self._stays:
                kept.save(self._memory)
                self._all.append(weakref.ref(kept))
        kept.uses += 1
        return kept

    def leave(self) -> None:
        """The device's later work comes after the copies to the host, and may have the memory."""
        if self._on_device and not self._stays:
            self._memory.mark()()
            for kept in self._on_device.values():
                kept.on_device = None
        self._on_device = {}

    def fetch(self) -> None:
        """Begin to bring all back, unless that has begun."""
        if self._arrive is None:
            for one in self._all:
                if kept := one():
                    kept.fetch(self._memory)
            self._arrive = self._memory.mark()

    def give(self, kept: Kept) -> Tensor:
        """One of them, for backward, which comes to the layer before next."""
        self.fetch()
        assert self._arrive is not None
        self._arrive()
        if self._before is not None:
            self._before.fetch()
        if kept.on_device is None:  # asked for once more, as by a second backward
            kept.fetch(self._memory)
            self._memory.mark()()
        return kept.take()


def memory_like(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device, contents undefined."""
    return torch.empty_like(tensor, device=device, pin_memory=False)


class ActivationOffload:
    """Of a block of layers that are computed one after the other, each once in a forward pass.

    Copies run beside the computation: to the host while the next layers are computed, back while the backward of the
    layer behind is. The last layer's stay, as backward begins there. Parameters, and tensors of less than
    `least_bytes`, are left to autograd.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Callable[[], Iterable[Tensor]],
        num_layers: int,
        *,
        least_bytes: int | None = None,
    ) -> None:
        self._memory = device_memory(device)
        self._parameters, self._num_layers = parameters, num_layers
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._of_parameters: set[int] = set()
        self._layers: list[LayerTensors] | None = None
        """Of the forward pass that goes on."""

    def attach(self, block: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """From now on `block` computes so with gradients; `layers` are called within it."""
        forward = block.forward

        @wraps(forward)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._of_parameters = {tensor.untyped_storage()._cdata for tensor in self._parameters()}
            self._layers = []
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    return forward(*args, **kwargs)
            finally:
                for layer in self._layers:
                    layer.leave()
                self._layers = None

        block.forward = offloading
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self._begin_layer())

    def _begin_layer(self) -> None:
        if self._layers is None:  # a layer that backward computes anew
            return
        before = self._layers[-1] if self._layers else None
        is_last = len(self._layers) + 1 == self._num_layers
        self._layers.append(LayerTensors(before, self._memory, stays=is_last))
        if len(self._layers) > AHEAD:
            self._layers[-1 - AHEAD].leave()

    def _pack(self, tensor: Tensor) -> Tensor | Kept:
        layers = self._layers
        if not layers or tensor.nbytes < self._least_bytes:
            return tensor
        if tensor.untyped_storage()._cdata in self._of_parameters:
            return tensor
        return layers[-1].keep(tensor)


def _unpack(packed: Tensor | Kept) -> Tensor:
    return packed.layer.give(packed) if isinstance(packed, Kept) else packed


def _key(tensor: Tensor) -> Key:
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor._version
