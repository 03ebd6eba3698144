"""What an engine keeps of samples: keys and values, as all caches have them, and states of whole samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rltrain.models import Architecture, Windows
from rltrain.models.attention import attend, sees
from rltrain.models.delta_rule import PackedStates, packed_states
from rltrain.models.routing_shape import RoutingShape
from rltrain.rollout.sample import Sample

# What layers keep of a sample as a whole, rather than of its tokens: the states of gated delta nets.

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


class PassStates:
    """States before and behind tokens that are computed in one pass: samples of `lengths` tokens in rows of `width`,
    each of which is for some `slots`; those that `follow` what stands in their slot are for one each."""

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
    """States of the first slots, which one token of each changes in place."""

    def __init__(self, kept: SampleStates, num_slots: int) -> None:
        self._inputs, self._states = (tensor[:, :num_slots] for tensor in kept.tensors())

    def run(self, layer: int, heads: DeltaHeads, projected: Tensor) -> Tensor:
        """As PassStates."""
        return heads.step(projected, self._inputs[layer], self._states[layer])


def _resized(tensor: Tensor, num_slots: int, num_used: int) -> Tensor:
    resized = tensor.new_zeros(tensor.size(0), num_slots, *tensor.shape[2:])
    resized[:, :num_used] = tensor[:, :num_used]
    return resized


# Keys and values of samples that wait between two turns, and which of them give way first.

M = TypeVar("M")


@dataclass(frozen=True)
class Parked(Generic[M]):
    """What is kept of a sample: the keys and values of `head`, the first tokens of its context, in `memory`."""

    head: tuple[int, ...]
    memory: M


class ParkedSamples(Generic[M]):
    """By sample id, in the order in which they were parked. `give_up` is told the memory of those that leave unused."""

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
        """Of all that is kept."""
        return sum(len(parked.head) for parked in self._parked.values())

    def add(self, sample: Sample, memory: M) -> None:
        """Keep all of the context but its last token, which has not been fed."""
        self.forget([sample.id])
        self._parked[sample.id] = Parked(sample.context[:-1], memory)
        self._num_ever += 1

    def expect(self, sample: Sample) -> None:
        """The sample comes back: what is kept of its id is given up unless its context goes on from there."""
        parked = self._parked.get(sample.id)
        if parked is not None and sample.context[: len(parked.head)] != parked.head:
            self.forget([sample.id])

    def get(self, sample: Sample) -> Parked[M] | None:
        """What is kept of a sample that is expected."""
        return self._parked.get(sample.id)

    def take(self, sample: Sample) -> Parked[M] | None:
        """As `get`, for the sample to go on with."""
        parked = self._parked.pop(sample.id, None)
        self._num_reused_tokens += len(parked.head) if parked else 0
        return parked

    def evict(self) -> bool:
        """Give up the one that was parked first; False where there is none."""
        oldest = next(iter(self._parked), None)
        if oldest is None:
            return False
        self.forget([oldest])
        self._num_evicted += 1
        return True

    def forget(self, ids: Iterable[int]) -> None:
        """Give up what is kept of the samples with these ids."""
        for number in ids:
            parked = self._parked.pop(number, None)
            if parked is not None:
                self._give_up(parked.memory)

    def clear(self) -> None:
        """Give up all."""
        self.forget([*self._parked])

    def metrics(self) -> dict[str, float]:
        """Since the last call; nothing as long as there has been no conversation."""
        if not self._num_ever:
            return {}
        counts = {"rollout/kv_reused_tokens": self._num_reused_tokens, "rollout/kv_evictions": self._num_evicted}
        self._num_reused_tokens = self._num_evicted = 0
        return dict(counts)


# Keys and values of samples, as the rest of the engine knows them: memory per slot, or blocks in a budget.

Head = tuple[int, ...]
"""All but the last token of a context: what is cached before a sample's first decode step."""
Keeper = tuple[int, int]
"""A slot, and the position from which on it has a head's keys and values stored."""


class Suffix(NamedTuple):
    """Tokens that follow what a slot holds, from position `first` on."""

    slot: int
    first: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.first + len(self.tokens)


class Entered(NamedTuple):
    """What is to be computed for samples that have entered: heads from their beginning on, with who keeps them, and
    what follows of those that are there in part."""

    heads: dict[Head, list[Keeper]]
    suffixes: list[Suffix]


class AttentionShape(NamedTuple):
    """A rank's attention over what is cached: `num_heads` queries and `num_kv_heads` keys of `head_dim` elements and as
    many values of `value_dim`. Scores are multiplied by `scale`.

    With `latent` a value is the first elements of its key, and is not kept a second time. With `windows` a token of
    some layers attends to no more than the last positions. With `softcap` scores are bent, with `sinks`
    every head has one more.
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
        """How many positions a token attends to in a layer, itself among them; None where to all."""
        return self.windows.of(layer) if self.windows else None

    @property
    def token_elements(self) -> int:
        """That are kept of a token in each layer."""
        return self.num_kv_heads * (self.head_dim if self.latent else self.head_dim + self.value_dim)


class CacheShape(NamedTuple):
    """What a cache is to hold at most, and where."""

    num_layers: int
    attention: AttentionShape
    max_slots: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    routing: RoutingShape | None = None
    states: StateShape | None = None


def unseen_bias(positions: Tensor, read: Tensor, window: int | None, like: Tensor) -> Tensor:
    """[..., tokens, positions read], of the type of `like`: 0 where a token at one of `positions` [..., tokens] attends
    to what stands at `read` [positions read], else -inf."""
    return like.new_zeros(()).masked_fill(~sees(positions, read, window), -torch.inf)


def window_biases(shape: AttentionShape, make: Callable[[int | None], Tensor]) -> dict[int | None, Tensor]:
    """By the windows of the layers of `shape`, None among them where a layer has none, what `make` gives."""
    windows = shape.windows
    found = {None} if windows is None else {windows.of(layer) for layer in range(len(windows.layers))}
    return {window: make(window) for window in found}


class PrefillAttention:
    """Causal attention within heads of `width` tokens (shorter ones padded on the right), which it also stores."""

    reads_cache = False
    states: PassStates | None = None
    """Of the samples, where the model has any."""

    def __init__(self, width: int, shape: AttentionShape) -> None:
        self._width, self._shape = width, shape
        self._biases: dict[int, Tensor] = {}
        """By window."""

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As DecodeAttention."""
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
        """[tokens, heads * value_dim]: attention of the tokens to each other alone, whatever is kept of them."""
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
        """Keep keys and values [tokens, kv_heads, head_dim] of the heads."""
        raise NotImplementedError

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """As DecodeAttention."""
        raise NotImplementedError

    def _by_head(self, tokens: Tensor) -> Tensor:
        """[heads of contexts, heads, width, head_dim]."""
        return tokens.view(-1, self._width, *tokens.shape[1:]).transpose(1, 2)


class SuffixAttention(PrefillAttention):
    """Attention of what follows in several slots, rows of `width` tokens (shorter ones padded on the right), to all
    that stands in their slots up to themselves. It stores them first; `num_read` positions of each slot are read."""

    reads_cache = True

    def __init__(
        self, suffixes: Sequence[Suffix], width: int, shape: AttentionShape, num_read: int, like: Tensor
    ) -> None:
        super().__init__(width, shape)
        firsts = torch.tensor([suffix.first for suffix in suffixes], device=like.device)
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
        """Keys and values [rows, kv_heads, positions, head_dim] of the slots."""
        raise NotImplementedError


class DecodeAttention(Protocol):
    """One new token in each of the first slots, stored, attending to its slot up to itself."""

    states: StepStates | None
    """Of the slots, where the model has any."""

    @property
    def reads_cache(self) -> bool:
        """Whether more is attended to than the tokens themselves: of that there is nothing but what is kept."""
        ...

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """[tokens, heads * value_dim] from queries [tokens, heads, head_dim], keys [tokens, kv_heads, head_dim] values
        [tokens, kv_heads, value_dim], with `sinks` [heads] as a further score of each head, of nothing."""
        ...

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """Keep the tokens' experts [tokens, top_k] in one of the layers that have experts, numbered by itself."""
        ...


class KvCache(ABC):
    """Running samples fill slots 0, 1, ... of it; on every rank of an engine the same ones."""

    capacity: int
    """Positions that a slot may have now."""
    kept: tuple[Tensor, ...]
    """Keys and values, or latents alone."""
    routing: tuple[Tensor, ...]
    """Experts of tokens, where they are recorded."""
    states: SampleStates | None
    """Of samples, where the model has any."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The memory that is held for keys and values now."""
        return *self._by_position(), *(self.states.tensors() if self.states else ())

    def _by_position(self) -> tuple[Tensor, ...]:
        """What has something of every token."""
        return *self.kept, *self.routing

    @abstractmethod
    def addresses(self) -> tuple[int, ...]:
        """Where it lies, and how: equal as long as a recorded step is valid."""

    @abstractmethod
    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Before a step of so many slots and positions; what the first `num_used` slots hold stays."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        """How many of the first of `waiting` may start beside those that run; where it has to decide and few fit, none,
        so that one prefill serves `num_wanted`. At least one where nothing runs."""

    @abstractmethod
    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> Entered:
        """Samples that `num_admissible` has let pass take slots from `first_slot` on; those that are parked get what
        they left. The rest is to be computed under the weights of `version`."""

    @abstractmethod
    def extend(self, slot: int, position: int) -> int:
        """Make room for one more position: how many the slot has room for then, `position` or fewer where there is
        none."""

    @abstractmethod
    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        """Put what slots `sources` hold, up to `num_positions`, in the place of what `destinations` do."""

    @abstractmethod
    def free(self, first: int, end: int) -> None:
        """Slots from `first` up to `end` hold nothing any more."""

    @abstractmethod
    def park(self, slot: int, sample: Sample) -> None:
        """Keep what the slot holds of `sample`, all but the last token, for when it comes back; the slot holds nothing
        any more."""

    @abstractmethod
    def routed(self, slot: int, first: int, end: int) -> Tensor:
        """The experts that are kept of positions `first` up to `end`: a copy [positions, layers, top_k]."""

    @property
    @abstractmethod
    def parked(self) -> ParkedSamples[Any]:
        """Samples that have left and may come back. Who needs room gets it from them."""

    def prefill_attention(
        self, keepers: Sequence[Sequence[Keeper]], lengths: Sequence[int], width: int
    ) -> PrefillAttention:
        """Over heads of these lengths, padded to `width`."""
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
        """Over what follows in different slots, padded to `width`."""
        attention = self._suffix_attention(suffixes, width)
        if self.states:
            lengths = [len(suffix.tokens) for suffix in suffixes]
            attention.states = PassStates(self.states, [[s.slot] for s in suffixes], lengths, width, follows=True)
        return attention

    @abstractmethod
    def _suffix_attention(self, suffixes: Sequence[Suffix], width: int) -> PrefillAttention: ...

    def decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention:
        """`positions` [slots] is where each slot's token stands, below `num_positions`."""
        attention = self._decode_attention(positions, num_positions)
        if self.states:
            attention.states = StepStates(self.states, len(positions))
        return attention

    @abstractmethod
    def _decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention: ...

    @abstractmethod
    def recorded_length(self, num_positions: int) -> int:
        """The `num_positions` for which a step is recorded that is to serve this one."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Since the last call: how full it was, where it has a limit, and what parked samples saved, where there were
        any."""


def _by_row(sinks: Tensor | None) -> Tensor | None:
    """As `attend` takes those of heads."""
    return None if sinks is None else sinks[:, None, None]


def rounded(count: int, sizes: int) -> int:
    """The next of the numbers of which there are `sizes` from each power of two up to the next."""
    below = 1 << max(0, (count - 1).bit_length() - 1)
    granule = max(1, below // sizes)
    return -(-count // granule) * granule
