"""Interfaces of KV caches, and the states that gated delta nets keep of whole samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rltrain.models import Architecture, Windows
from rltrain.models.attention import attend, sees
from rltrain.models.delta_rule import DeltaHeads, packed_states
from rltrain.models.routing_shape import RoutingShape
from rltrain.reshard.copy_table import Zeros
from rltrain.rollout.sample import Sample

# What the host gives to the device.


def uploaded(values: Any, device: torch.device) -> Tensor:
    """Returns int64 `values`, nested sequences, or an array of any dtype, on `device`. Does not wait for the device."""
    made = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)


# States of samples in layers with gated delta nets. They replace keys and values of single tokens.

STATE_DTYPE = torch.float32
"""Dtype of states. Every token of a sample is added to them. Inputs of the convolution have the model's dtype."""


class StateShape(NamedTuple):
    """Shape of the states of one sample on a rank.

    Each of `num_layers` layers has a state [key_dim, value_dim] for each of `num_heads` heads, and the last `kernel` -
    1 inputs of the convolution over `channels`.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    @classmethod
    def of(cls, architecture: Architecture, num_ranks: int) -> "StateShape | None":
        """Returns the shape on each of `num_ranks` ranks. Returns None if the model has no such layers."""
        if architecture.delta is None or not architecture.delta.num_layers:
            return None
        own = architecture.delta.shared_by(num_ranks)
        return cls(own.num_layers, own.num_heads, own.key_dim, own.value_dim, own.channels, own.kernel)

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one sample in a model of `dtype`."""
        states = self.num_heads * self.key_dim * self.value_dim * STATE_DTYPE.itemsize
        return self.num_layers * (states + self.channels * (self.kernel - 1) * dtype.itemsize)


class SampleStates:
    """States of the samples in slots. All of them are finite, also those of unused slots.

    `inputs` has shape [layers, slots, kernel - 1, channels]. `states` has shape [layers, slots, heads, key_dim,
    value_dim].
    """

    def __init__(self, shape: StateShape, dtype: torch.dtype, device: torch.device, zeros: Zeros | None = None) -> None:
        self.shape, self._zeros = shape, zeros
        self.inputs = torch.zeros(shape.num_layers, 0, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        sizes = (shape.num_layers, 0, shape.num_heads, shape.key_dim, shape.value_dim)
        self.states = torch.zeros(sizes, dtype=STATE_DTYPE, device=device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.states

    def hold(self, num_slots: int, num_used: int = 0) -> None:
        """Allocates memory for `num_slots`. The first `num_used` slots keep their content."""
        if self._zeros and num_slots and not num_used:
            kinds = [((x.size(0), num_slots, *x.shape[2:]), x.dtype) for x in self.tensors()]
            self.inputs, self.states = self._zeros(kinds)
            return
        self.inputs, self.states = (_resized(tensor, num_slots, num_used) for tensor in self.tensors())

    def begin(self, first: int, end: int) -> None:
        """Resets the slots from `first` up to `end` for new samples."""
        for tensor in self.tensors():
            tensor[:, first:end] = 0

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies the content of slots `sources` to slots `destinations`."""
        to, by = torch.tensor([destinations, sources], device=self.states.device)
        for tensor in self.tensors():
            tensor[:, to] = tensor[:, by]

    def parked(self, slot: int) -> tuple[Tensor, Tensor]:
        """Returns a copy of a slot's content on the host. Device memory is reserved for running samples."""
        inputs, states = (torch.empty_like(x[:, slot], device="cpu").copy_(x[:, slot]) for x in self.tensors())
        return inputs, states

    def resume(self, slot: int, parked: tuple[Tensor, Tensor]) -> None:
        """Copies parked content into a slot."""
        for tensor, kept in zip(self.tensors(), parked, strict=True):
            tensor[:, slot] = kept.to(tensor.device)


class PassStates:
    """States before and after the tokens of one pass.

    The pass has samples of `lengths` tokens, in rows of `width` tokens. The result of a sample is stored in all of its
    `slots`. With `follows` samples continue from their slot's content and have one slot each.
    """

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
        """Returns the outputs of a layer's heads, shape [tokens, values], with zeros for padding. Stores the new
        states."""
        inputs, states = (tensor[layer] for tensor in self._kept.tensors())
        before, initial = (inputs[self._slots], states[self._slots]) if self._follows else (None, None)
        made, last, final = heads.whole(projected.index_select(0, self._rows), self._packed, before, initial)
        inputs[self._slots] = last[self._samples].to(inputs.dtype)
        states[self._slots] = final[self._samples].to(states.dtype)
        return made.new_zeros(self._num_tokens, made.size(1)).index_copy_(0, self._rows, made)


class StepStates:
    """States of the first slots, updated in place by one token each."""

    def __init__(self, kept: SampleStates, num_slots: int) -> None:
        self._inputs, self._states = (tensor[:, :num_slots] for tensor in kept.tensors())

    def run(self, layer: int, heads: DeltaHeads, projected: Tensor) -> Tensor:
        """Returns the outputs (see PassStates.run)."""
        return heads.step(projected, self._inputs[layer], self._states[layer])


def _resized(tensor: Tensor, num_slots: int, num_used: int) -> Tensor:
    resized = tensor.new_zeros(tensor.size(0), num_slots, *tensor.shape[2:])
    resized[:, :num_used] = tensor[:, :num_used]
    return resized


# Parked keys and values of samples between two turns, and their eviction.

M = TypeVar("M")


@dataclass(frozen=True)
class Parked(Generic[M]):
    """The kept keys and values of a sample. They belong to `head`, the first tokens of its context."""

    head: tuple[int, ...]
    memory: M


class ParkedSamples(Generic[M]):
    """Parked samples by id, in the order of parking. `give_up` is called with the memory of samples that leave
    unused."""

    def __init__(self, give_up: Callable[[M], None]) -> None:
        self._give_up = give_up
        self._parked: dict[int, Parked[M]] = {}
        self._num_ever = 0
        self._num_reused_tokens = 0
        self._num_evicted = 0

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parked samples."""
        return sum(len(parked.head) for parked in self._parked.values())

    def add(self, sample: Sample, memory: M) -> None:
        """Parks the sample's context except for its last token, which has not been processed yet."""
        self.forget([sample.id])
        self._parked[sample.id] = Parked(sample.context[:-1], memory)
        self._num_ever += 1

    def expect(self, sample: Sample) -> None:
        """Prepares for a returning sample. Gives up its parked memory if its context does not start with the parked
        tokens."""
        parked = self._parked.get(sample.id)
        if parked is not None and sample.context[: len(parked.head)] != parked.head:
            self.forget([sample.id])

    def get(self, sample: Sample) -> Parked[M] | None:
        """Returns the parked memory of a returning sample, or None."""
        return self._parked.get(sample.id)

    def take(self, sample: Sample) -> Parked[M] | None:
        """Removes and returns the parked memory, so that the sample can continue with it."""
        parked = self._parked.pop(sample.id, None)
        self._num_reused_tokens += len(parked.head) if parked else 0
        return parked

    @property
    def oldest(self) -> Parked[M] | None:
        """The sample parked first, if any."""
        return next(iter(self._parked.values()), None)

    def evict(self) -> bool:
        """Gives up the sample parked first. Returns False if there is none."""
        oldest = next(iter(self._parked), None)
        if oldest is None:
            return False
        self.forget([oldest])
        self._num_evicted += 1
        return True

    def forget(self, ids: Iterable[int]) -> None:
        """Gives up the parked memory of the samples with these ids."""
        for number in ids:
            parked = self._parked.pop(number, None)
            if parked is not None:
                self._give_up(parked.memory)

    def clear(self) -> None:
        """Gives up all parked memory."""
        self.forget([*self._parked])

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call. They are empty until a conversation has been parked."""
        if not self._num_ever:
            return {}
        counts = {"rollout/kv_reused_tokens": self._num_reused_tokens, "rollout/kv_evictions": self._num_evicted}
        self._num_reused_tokens = self._num_evicted = 0
        return dict(counts)


# The interface of KV caches, with memory per slot or blocks within a budget.

Head = tuple[int, ...]
"""A context without its last token. It is cached before the first decode step of a sample."""
Keeper = tuple[int, int]
"""(slot, position). The slot stores the keys and values of a head from this position on."""


class Suffix(NamedTuple):
    """Tokens that follow a slot's cached content, from position `first` on.

    Suffixes of a `round` follow the tokens of heads and earlier rounds. Further slots in `others` store them too.
    """

    slot: int
    first: int
    tokens: tuple[int, ...]
    round: int = 0
    others: tuple[Keeper, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last of its tokens."""
        return self.first + len(self.tokens)


class Entered(NamedTuple):
    """The work needed for newly entered samples: whole heads with the slots to store them, and suffixes of cached
    samples and prompts.

    `num_parked_tokens` and `num_prefix_tokens` are there from earlier turns and from prompts that begin alike.
    """

    heads: dict[Head, list[Keeper]]
    suffixes: list[Suffix]
    num_parked_tokens: int = 0
    num_prefix_tokens: int = 0

    @property
    def num_computed_tokens(self) -> int:
        return sum(map(len, self.heads)) + sum(len(suffix.tokens) for suffix in self.suffixes)


@dataclass
class HeadTokens:
    """Tokens of the heads of all samples that entered, and where they came from, since the last report."""

    num_tokens: int = 0
    num_computed: int = 0
    num_parked: int = 0
    num_of_prefixes: int = 0

    def add(self, num_tokens: int, entered: Entered) -> None:
        """Adds samples with heads of `num_tokens` together."""
        self.num_tokens += num_tokens
        self.num_computed += entered.num_computed_tokens
        self.num_parked += entered.num_parked_tokens
        self.num_of_prefixes += entered.num_prefix_tokens

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call. Tokens of earlier turns are among those of `ParkedSamples`."""
        num_of_groups = self.num_tokens - self.num_computed - self.num_parked - self.num_of_prefixes
        counts = {
            "rollout/context_tokens": self.num_tokens,
            "rollout/context_computed_tokens": self.num_computed,
            "rollout/context_group_tokens": num_of_groups,
            "rollout/context_prefix_tokens": self.num_of_prefixes,
        }
        self.num_tokens = self.num_computed = self.num_parked = self.num_of_prefixes = 0
        return dict(counts)


class AttentionShape(NamedTuple):
    """Shape of a rank's attention over cached tokens.

    It has `num_heads` queries and `num_kv_heads` keys of `head_dim` elements, and values of `value_dim` elements.
    Scores are multiplied by `scale`.

    With `latent` a value is the first elements of its key and is not stored separately. `windows` limit the attended
    positions in some layers. `softcap` caps scores, and with `sinks` every head has one more score.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    latent: bool = False
    windows: Windows | None = None
    softcap: float | None = None
    sinks: bool = False

    def window(self, layer: int) -> int | None:
        """Returns the number of positions attended to in a layer, the token itself included. Returns None for all
        positions."""
        return self.windows.of(layer) if self.windows else None

    @property
    def token_elements(self) -> int:
        """Elements kept of a token in each layer."""
        return self.num_kv_heads * (self.head_dim if self.latent else self.head_dim + self.value_dim)


class CacheShape(NamedTuple):
    """Limits, shape, dtype and device of a cache."""

    num_layers: int
    attention: AttentionShape
    max_slots: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    routing: RoutingShape | None = None
    states: StateShape | None = None


def unseen_bias(positions: Tensor, read: Tensor, window: int | None, like: Tensor) -> Tensor:
    """Returns the attention bias [..., tokens, positions read] with the dtype of `like`.

    It is 0 if a token at one of `positions` [..., tokens] attends to a position of `read` [positions read], else -inf.
    """
    return like.new_zeros(()).masked_fill(~sees(positions, read, window), -torch.inf)


def window_biases(shape: AttentionShape, make: Callable[[int | None], Tensor]) -> dict[int | None, Tensor]:
    """Returns the result of `make` for each distinct window of the layers. None is the window of layers without one."""
    windows = shape.windows
    found = {None} if windows is None else {windows.of(layer) for layer in range(len(windows.layers))}
    return {window: make(window) for window in found}


class PrefillAttention:
    """Causal attention within heads padded on the right to `width` tokens. It also stores their keys and values."""

    reads_cache = False
    states: PassStates | None = None
    """States of the samples, if the model has any."""

    def __init__(self, width: int, shape: AttentionShape) -> None:
        self._width, self._shape = width, shape
        self._biases: dict[int, Tensor] = {}
        """Attention biases by window."""

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores the tokens and attends (see DecodeAttention)."""
        self.store(layer, keys, values)
        return self.among(queries, keys, values, self._shape.window(layer), sinks)

    def among(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns [tokens, heads * value_dim], the attention of the tokens to each other only. Nothing cached is
        read."""
        q, k, v = self._by_head(queries), self._by_head(keys), self._by_head(values)
        bias = None
        if window is not None and window < self._width:
            if window not in self._biases:
                places = torch.arange(self._width, device=q.device)
                self._biases[window] = unseen_bias(places, places, window, q)
            bias = self._biases[window]
        shape = self._shape
        attended = attend(
            q, k, v, bias, causal=bias is None, scale=shape.scale, softcap=shape.softcap, sinks=_by_row(sinks)
        )
        return attended.transpose(1, 2).reshape(len(queries), -1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] of the heads."""
        raise NotImplementedError

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """Keeps the experts of the tokens (see DecodeAttention)."""
        raise NotImplementedError

    def _by_head(self, tokens: Tensor) -> Tensor:
        """Reshapes to [contexts, heads, width, head_dim]."""
        return tokens.view(-1, self._width, *tokens.shape[1:]).transpose(1, 2)


class SuffixAttention(PrefillAttention):
    """Attention of suffixes in several slots to everything in their slots up to themselves.

    The suffixes are padded on the right to `width` tokens and stored first. `num_read` positions of each slot are read.
    """

    reads_cache = True

    def __init__(
        self, suffixes: Sequence[Suffix], width: int, shape: AttentionShape, num_read: int, like: Tensor
    ) -> None:
        super().__init__(width, shape)
        firsts = uploaded([suffix.first for suffix in suffixes], like.device)
        positions = firsts[:, None] + torch.arange(width, device=like.device)
        read = torch.arange(num_read, device=like.device)
        self._bias_of = window_biases(shape, lambda window: unseen_bias(positions, read, window, like)[:, None])

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.store(layer, keys, values)
        k, v = self.read(layer)
        bias = self._bias_of[self._shape.window(layer)]
        q, shape = self._by_head(queries), self._shape
        attended = attend(q, k, v, bias, scale=shape.scale, softcap=shape.softcap, sinks=_by_row(sinks))
        return attended.transpose(1, 2).reshape(len(queries), -1)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the slots, shape [rows, kv_heads, positions, head_dim]."""
        raise NotImplementedError


class Written(NamedTuple):
    """Places for the keys and values of new tokens in a layer's memory.

    Row t of `table` has the numbers of a slot's blocks of `block_tokens` rows. A token goes to the row of its position.
    Element 0 of head h goes to row * `row_stride` + h * `head_stride`, counted in elements.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    positions: Tensor
    block_tokens: int
    row_stride: int
    head_stride: int


class DecodeAttention(Protocol):
    """Attention of one new token in each of the first slots. It stores the token and attends to its slot up to it."""

    states: StepStates | None
    """States of the slots, if the model has any."""

    @property
    def reads_cache(self) -> bool:
        """Whether attention includes earlier tokens. For those only cached data is available."""
        ...

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Returns [tokens, heads * value_dim].

        Queries have shape [tokens, heads, head_dim], keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads,
        value_dim]. `sinks` [heads] is a further score of each head without a value.
        """
        ...

    def written(self, layer: int) -> Written:
        """Returns the places of the tokens. The caller stores them there and then calls `attend`."""
        ...

    def attend(self, layer: int, queries: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attends after the tokens have been stored (see __call__)."""
        ...

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """Keeps the tokens' experts [tokens, top_k]. `layer` counts only the layers with experts."""
        ...


class KvCache(ABC):
    """Cache of running samples in slots 0, 1, .... All ranks of an engine have the same samples in the same slots."""

    capacity: int
    """Positions available in a slot at present."""
    kept: tuple[Tensor, ...]
    """Keys and values, or only latents."""
    routing: tuple[Tensor, ...]
    """Experts of tokens, if they are recorded."""
    states: SampleStates | None
    """States of samples, if the model has any."""
    allows_ahead: bool
    """Whether a step may be launched before the results of the one before are read."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns all tensors with memory of the cache."""
        return *self._by_position(), *(self.states.tensors() if self.states else ())

    def _by_position(self) -> tuple[Tensor, ...]:
        """Returns the tensors with one entry per token."""
        return *self.kept, *self.routing

    @abstractmethod
    def addresses(self) -> tuple[int, ...]:
        """Returns addresses and shapes of the memory. They are equal as long as a recorded step is valid."""

    @abstractmethod
    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Makes room for a step with so many slots and positions. The first `num_used` slots keep their content."""

    @abstractmethod
    def release(self) -> None:
        """Frees the memory."""

    @abstractmethod
    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        """Returns the number of samples at the front of `waiting` that may start with the running ones.

        It is at least 1 if nothing runs. If fewer than `num_wanted` fit it may be 0, so that one prefill later serves
        more.
        """

    @abstractmethod
    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> Entered:
        """Assigns slots from `first_slot` on to samples admitted by `num_admissible`. Parked samples get their content
        back.

        Returns the rest to be computed under the weights of `version`.
        """

    @abstractmethod
    def extend(self, slot: int, position: int) -> int:
        """Makes room for `position` in a slot. Returns the number of positions with room, at most `position` if there
        is none."""

    @abstractmethod
    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        """Copies the content of slots `sources`, up to `num_positions`, to slots `destinations`."""

    @abstractmethod
    def free(self, first: int, end: int) -> None:
        """Frees the content of the slots from `first` up to `end`."""

    def erase(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Writes zeros over one position of each slot, so that no later owner of the memory finds NaN there.

        Only caches that allow steps ahead need it.
        """
        raise NotImplementedError

    @abstractmethod
    def forget_prompts(self) -> None:
        """Gives up what is kept of prompts for others that begin alike. Running and parked samples keep theirs."""

    @abstractmethod
    def park(self, slot: int, sample: Sample) -> None:
        """Keeps the slot's content for the sample's return, without its last token. The slot is then empty."""

    @abstractmethod
    def routed(self, slot: int, first: int, end: int) -> Tensor:
        """Returns a copy of the recorded experts of positions `first` up to `end`, shape [positions, layers, top_k]."""

    @property
    @abstractmethod
    def parked(self) -> ParkedSamples[Any]:
        """Samples between two turns. Their memory is given up if others need it."""

    def prefill_attention(
        self, keepers: Sequence[Sequence[Keeper]], lengths: Sequence[int], width: int
    ) -> PrefillAttention:
        """Returns the attention over heads of these lengths, padded to `width`."""
        attention = self._prefill_attention(keepers, lengths, width)
        if self.states:
            slots = [[slot for slot, _ in of_head] for of_head in keepers]
            attention.states = PassStates(self.states, slots, lengths, width, follows=False)
        return attention

    @abstractmethod
    def _prefill_attention(
        self, keepers: Sequence[Sequence[Keeper]], lengths: Sequence[int], width: int
    ) -> PrefillAttention: ...

    def suffix_attention(self, suffixes: Sequence[Suffix], width: int) -> PrefillAttention:
        """Returns the attention over suffixes in different slots, padded to `width`."""
        attention = self._suffix_attention(suffixes, width)
        if self.states:
            lengths = [len(suffix.tokens) for suffix in suffixes]
            attention.states = PassStates(self.states, [[s.slot] for s in suffixes], lengths, width, follows=True)
        return attention

    @abstractmethod
    def _suffix_attention(self, suffixes: Sequence[Suffix], width: int) -> PrefillAttention: ...

    def decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention:
        """Returns the attention of a decode step. `positions` [slots] are the tokens' positions, all below
        `num_positions`."""
        attention = self._decode_attention(positions, num_positions)
        if self.states:
            attention.states = StepStates(self.states, len(positions))
        return attention

    @abstractmethod
    def _decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention: ...

    @abstractmethod
    def recorded_length(self, num_positions: int) -> int:
        """Returns the number of positions of the recorded step to be used for `num_positions`."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call: peak use of a limited cache, and reuse of parked samples if there
        were any."""


def _by_row(sinks: Tensor | None) -> Tensor | None:
    """Adds the dimensions expected by `attend` to the sinks of heads."""
    return None if sinks is None else sinks[:, None, None]


def rounded(count: int, sizes: int) -> int:
    """Rounds `count` up to a number on a grid, for few different shapes. `sizes` is a power of two.

    The grid has `sizes` evenly spaced numbers above each power of two, up to and including the next one. With 4 sizes
    the grid above 8 is 10, 12, 14, 16. Counts up to 2 * `sizes` stay the same.
    """
    below = 1 << max(0, (count - 1).bit_length() - 1)
    granule = max(1, below // sizes)
    return -(-count // granule) * granule
