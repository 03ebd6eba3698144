"""Activation offload. Tensors saved for backward wait on the host from a layer's forward until shortly before its
backward."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rltrain.offload.device_memory import DeviceMemory, device_memory

LEAST_BYTES = 1 << 20
"""Smallest size in bytes of an offloaded tensor."""
AHEAD = 2
"""Number of latest layers with tensors still on the device during forward. This is also the time for their copies."""

Key = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


class Kept:
    """One saved tensor of a layer. It is on the host, and on the device while it is copied or needed."""

    def __init__(self, tensor: Tensor, layer: "LayerTensors") -> None:
        self.layer = layer
        self.on_device: Tensor | None = tensor.detach()
        self.uses = 0
        """Number of remaining requests by backward."""
        self._device = tensor.device
        self._host: Tensor | None = None

    def save(self, memory: DeviceMemory) -> None:
        """Starts its copy to the host."""
        assert self.on_device is not None
        self._host = torch.empty_like(self.on_device, device="cpu", pin_memory=memory.pins)
        with memory.copies():
            self._host.copy_(self.on_device, non_blocking=True)

    def fetch(self, memory: DeviceMemory) -> None:
        """Starts its copy back, into memory of the computing stream."""
        if self.on_device is None:
            assert self._host is not None
            self.on_device = memory_like(self._host, self._device)
            with memory.copies():  # after earlier work, which may still use this memory
                self.on_device.copy_(self._host, non_blocking=True)

    def take(self) -> Tensor:
        """Returns the tensor on the device. The reference here is dropped with the last expected use."""
        found = self.on_device
        assert found is not None
        self.uses -= 1
        if self.uses <= 0 and self._host is not None:
            self.on_device = None
        return found


class LayerTensors:
    """The saved tensors of one layer in one forward pass. They live as long as autograd may request them.

    With `stays` they are not copied. The object then only notices that backward has reached the layer.
    """

    def __init__(self, before: "LayerTensors | None", memory: DeviceMemory, *, stays: bool) -> None:
        self._before, self._memory, self._stays = before, memory, stays
        self._on_device: dict[Key, Kept] = {}
        """Tensors before they leave. Several operations may save the same tensor."""
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
        """Frees the tensors on the device after their copies to the host. Later work of the device may use the
        memory."""
        if self._on_device and not self._stays:
            self._memory.mark()()
            for kept in self._on_device.values():
                kept.on_device = None
        self._on_device = {}

    def fetch(self) -> None:
        """Starts to copy all tensors back, once."""
        if self._arrive is None:
            for one in self._all:
                if kept := one():
                    kept.fetch(self._memory)
            self._arrive = self._memory.mark()

    def give(self, kept: Kept) -> Tensor:
        """Returns one of the tensors for backward. Also starts to copy back the tensors of the layer before."""
        self.fetch()
        assert self._arrive is not None
        self._arrive()
        if self._before is not None:
            self._before.fetch()
        if kept.on_device is None:  # requested once more, for example by a second backward
            kept.fetch(self._memory)
            self._memory.mark()()
        return kept.take()


def memory_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns an uninitialized tensor of this shape and dtype on a device."""
    return torch.empty_like(tensor, device=device, pin_memory=False)


class ActivationOffload:
    """Offloads the activations of a block of layers computed in sequence, each once per forward pass.

    Copies overlap the computation. Those to the host overlap the next layers. Those back overlap the backward of the
    layer above. The last layer's activations stay, because backward begins there. Parameters, and tensors of less than
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
        """Layers of the running forward pass."""

    def attach(self, block: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Offloads the activations of `block` in every forward pass with gradients. `layers` must be called within
        it."""
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
        if self._layers is None:  # a layer recomputed by backward
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
