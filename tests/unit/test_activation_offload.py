"""Tensors that layers keep for backward, on the host meanwhile: the same gradients, and copies that are in order."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rltrain.offload import activations
from rltrain.offload.activations import ActivationOffload, _unpack
from rltrain.offload.device_memory import CudaMemory
from tests.stand_ins.cuda_streams import Device, Operators, RaceError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZE = 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(torch.nn.functional.silu(x)))


class Block(torch.nn.Module):
    def __init__(self, num_layers: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


def block(num_layers: int, *, recompute: bool = False, offload: bool = False) -> Block:
    torch.manual_seed(0)
    made = Block(num_layers, recompute=recompute)
    if offload:
        ActivationOffload(CPU, made.parameters, num_layers, least_bytes=0).attach(made, made.layers)
    return made


def gradients(model: Block, num_batches: int) -> list[Tensor]:
    """All forwards before all backwards, as in a pipeline's first stage."""
    torch.manual_seed(1)
    batches = [torch.randn(3, SIZE, requires_grad=True) for _ in range(num_batches)]
    losses = [model(batch).square().sum() for batch in batches]
    for loss in losses:
        loss.backward()
    return [p.grad for p in (*model.parameters(), *batches)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_gradients_are_the_same_bit_for_bit(num_layers: int, num_batches: int, recompute: bool) -> None:
    found, expected = (
        gradients(block(num_layers, recompute=recompute, offload=offload), num_batches) for offload in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("learns", [True, False])
def test_nothing_that_is_kept_outlives_a_pass(learns: bool) -> None:
    model, counts = block(4, offload=True), []
    for _ in range(2):
        with torch.set_grad_enabled(learns):
            loss = model(torch.randn(3, SIZE, requires_grad=True)).sum()
        if learns:
            loss.backward()
        del loss
        counts.append(num_tensors())
    assert counts[0] == counts[1]


def test_a_second_backward_is_given_the_tensors_again() -> None:
    model, plain = block(3, offload=True), block(3)
    for one in (model, plain):
        x = torch.ones(2, SIZE, requires_grad=True)
        loss = one(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


class Pass:
    """Forward and backward of layers that keep tensors, on a device that notes what is ordered; memory that they no
    longer need is written over by whatever comes next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.device.install(monkeypatch)
        monkeypatch.setattr(CudaMemory, "pins", False)
        monkeypatch.setattr(activations, "memory_like", self.memory_like)
        self.operators = Operators(self.device)
        self.reused: list[Tensor] = []

    def memory_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        made = torch.empty(tensor.shape)
        self.operators.holds([made])
        self.device.allocated(made.untyped_storage()._cdata, made.nbytes)
        return made

    def run(self, counts: list[int]) -> None:
        offload = ActivationOffload(CUDA, list, len(counts), least_bytes=0)
        offload._layers = []
        packed: list[list[Any]] = []
        with self.operators:
            for layer, count in enumerate(counts):
                offload._begin_layer()
                gone = layer - activations.AHEAD
                for _, tensor, _ in packed[gone] if gone >= 0 else ():
                    tensor.zero_()
                made = [torch.empty(8) for _ in range(count)]
                self.operators.holds(made)
                packed.append([(offload._pack(tensor.fill_(layer)), tensor, layer) for tensor in made])
            for tensors in offload._layers:
                tensors.leave()
            offload._layers = None
            for _, tensor, _ in (one for of_layer in packed[:-1] for one in of_layer):
                tensor.zero_()
            for of_layer in reversed(packed):
                for kept, _, value in of_layer:
                    given = _unpack(kept)
                    assert torch.equal(given.mul(1), torch.full((8,), float(value)))
                    if value < len(counts) - 1:
                        given.zero_()  # its memory is another's


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_copies_are_ordered_with_the_computation(counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Pass(monkeypatch).run(counts)


@pytest.mark.parametrize("what", ["copies", "mark"])
def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    unordered = {"copies": lambda self: torch.cuda.stream(self._stream), "mark": lambda self: lambda: None}
    monkeypatch.setattr(CudaMemory, what, unordered[what])
    with pytest.raises(RaceError):
        Pass(monkeypatch).run([2, 1, 2, 1, 2])
