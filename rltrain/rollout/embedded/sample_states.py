"""What layers keep of a sample as a whole, rather than of its tokens: the states of gated delta nets."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.delta_rule import PackedStates, packed_states

STATE_DTYPE = torch.float32
"""Of states, which every token of a sample adds to; the convolution's inputs have the model's type."""


class StateShape(NamedTuple):
    """On a rank, of each sample: in each of `num_layers` layers a state [key_dim, value_dim] for each of `num_heads`,
    and the last `kernel` - 1 inputs of the convolution of `channels`."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    @classmethod
    def of(cls, architecture: Architecture, num_ranks: int) -> "StateShape | None":
        """On each of `num_ranks`; None where the model has no such layers."""
        if architecture.delta is None or not architecture.delta.num_layers:
            return None
        own = architecture.delta.shared_by(num_ranks)
        return cls(own.num_layers, own.num_heads, own.key_dim, own.value_dim, own.channels, own.kernel)

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Of one sample, in a model of `dtype`."""
        states = self.num_heads * self.key_dim * self.value_dim * STATE_DTYPE.itemsize
        return self.num_layers * (states + self.channels * (self.kernel - 1) * dtype.itemsize)


class DeltaHeads(Protocol):
    """The heads of a layer: what they make of what is projected for them [tokens, ...], [tokens, values]."""

    def whole(
        self, projected: Tensor, packed: PackedStates, before: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(that, the last inputs of the convolution, the states behind the samples) for tokens of whole samples, or
        such as follow `before` and `initial`."""
        ...

    def step(self, projected: Tensor, before: Tensor, states: Tensor) -> Tensor:
        """That, for a token of each sample; `before` and `states` take it in, in place."""
        ...


class SampleStates:
    """Of the samples in slots: `inputs` [layers, slots, kernel - 1, channels] and `states` [layers, slots, heads,
    key_dim, value_dim]. Every slot's are finite, whoever used it last."""

    def __init__(self, shape: StateShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.inputs = torch.zeros(shape.num_layers, 0, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        sizes = (shape.num_layers, 0, shape.num_heads, shape.key_dim, shape.value_dim)
        self.states = torch.zeros(sizes, dtype=STATE_DTYPE, device=device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.states

    def hold(self, num_slots: int, num_used: int = 0) -> None:
        """Have memory for `num_slots`, of which the first `num_used` keep what they hold."""
        self.inputs, self.states = (_resized(tensor, num_slots, num_used) for tensor in self.tensors())

    def begin(self, first: int, end: int) -> None:
        """Samples enter these slots of which nothing is known yet."""
        for tensor in self.tensors():
            tensor[:, first:end] = 0

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """What slots `sources` hold, in the place of what `destinations` do."""
        to, by = torch.tensor([destinations, sources], device=self.states.device)
        for tensor in self.tensors():
            tensor[:, to] = tensor[:, by]

    def parked(self, slot: int) -> tuple[Tensor, Tensor]:
        """A copy of what a slot holds, on the host: device memory is for samples that run."""
        inputs, states = (torch.empty_like(x[:, slot], device="cpu").copy_(x[:, slot]) for x in self.tensors())
        return inputs, states

    def resume(self, slot: int, parked: tuple[Tensor, Tensor]) -> None:
        """What was parked, in a slot."""
        for tensor, kept in zip(self.tensors(), parked, strict=True):
            tensor[:, slot] = kept.to(tensor.device)

    def of_pass(
        self, slots: Sequence[Sequence[int]], lengths: Sequence[int], width: int, *, follows: bool
    ) -> "PassStates":
        """For samples of `lengths` tokens in rows of `width`, each of which is for some slots; those that `follow` what
        stands in their slot are for one each."""
        return PassStates(self, slots, lengths, width, follows=follows)

    def of_step(self, num_slots: int) -> "StepStates":
        """For one token of each of the first slots."""
        return StepStates(self, num_slots)


class PassStates:
    """States before and behind tokens that are computed in one pass, rows of padded samples."""

    def __init__(
        self, kept: SampleStates, slots: Sequence[Sequence[int]], lengths: Sequence[int], width: int, *, follows: bool
    ) -> None:
        device = kept.states.device
        self._kept, self._num_tokens = kept, len(lengths) * width
        self._packed = packed_states(lengths, kept.shape.kernel, device)
        places = torch.arange(width) < torch.tensor(lengths)[:, None]
        self._rows = places.flatten().nonzero().squeeze(1).to(device)
        copies = [(slot, number) for number, of_sample in enumerate(slots) for slot in of_sample]
        self._slots, self._samples = torch.tensor(copies, device=device).unbind(1)
        self._follows = follows

    def run(self, layer: int, heads: DeltaHeads, projected: Tensor) -> Tensor:
        """What the heads of a layer make of the tokens [tokens, values], zeros for padding; states are kept."""
        inputs, states = (tensor[layer] for tensor in self._kept.tensors())
        before, initial = (inputs[self._slots], states[self._slots]) if self._follows else (None, None)
        made, last, final = heads.whole(projected.index_select(0, self._rows), self._packed, before, initial)
        inputs[self._slots] = last[self._samples].to(inputs.dtype)
        states[self._slots] = final[self._samples].to(states.dtype)
        return made.new_zeros(self._num_tokens, made.size(1)).index_copy_(0, self._rows, made)


class StepStates:
    """States of the first slots, which a token of each changes in place."""

    def __init__(self, kept: SampleStates, num_slots: int) -> None:
        self._inputs, self._states = (tensor[:, :num_slots] for tensor in kept.tensors())

    def run(self, layer: int, heads: DeltaHeads, projected: Tensor) -> Tensor:
        """As PassStates."""
        return heads.step(projected, self._inputs[layer], self._states[layer])


def _resized(tensor: Tensor, num_slots: int, num_used: int) -> Tensor:
    resized = tensor.new_zeros(tensor.size(0), num_slots, *tensor.shape[2:])
    resized[:, :num_used] = tensor[:, :num_used]
    return resized
