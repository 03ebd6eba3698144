"""A KV cache with one slot per running sample, and attention over it. Its memory grows with the need."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.models.attention import attend
from rltrain.rollout.embedded.kv_cache import (
    AttentionShape,
    CacheShape,
    DecodeAttention,
    Entered,
    Keeper,
    KvCache,
    ParkedSamples,
    PrefillAttention,
    SampleStates,
    StepStates,
    Suffix,
    SuffixAttention,
    Written,
    rounded,
    uploaded,
    window_biases,
)
from rltrain.rollout.sample import Sample

_LENGTH_MULTIPLE = 8
_MIN_READ = 16
"""Minimum number of positions. With shorter rows softmax and products are several times slower on CPUs."""
_RECORDED_SIZES = 4
"""Recorded sizes (lengths) between two powers of two."""


class SlotCache(KvCache):
    """Keys and values in two tensors of shape [layers, slots, kv_heads, capacity, head_dim].

    With latent attention `values` are a view of `keys`. Memory follows the need: `reserve` at least doubles the slots,
    or extends the positions by at least half, within the limits of `shape`. Growing positions by half keeps the read
    data denser than doubling. All entries are finite even before they are written, so masked entries contribute exactly
    zero. `mask` [slots, kv_heads, capacity] is added to attention scores. It is 0 for existing tokens and -inf
    elsewhere.

    Parked content is copied to separate memory, limited to the size of all slots. Per-sample states are kept per slot.
    """

    allows_ahead = False
    """A slot keeps NaN of a failed sample until its failure is read."""

    def __init__(self, shape: CacheShape) -> None:
        self.attention, self._routing_shape = shape.attention, shape.routing
        self._max_slots = shape.max_slots
        self._max_positions = round_up(shape.max_positions)
        sizes = (shape.num_layers, 0, shape.attention.num_kv_heads, 0, shape.attention.head_dim)
        self.keys = torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
        self.states = SampleStates(shape.states, shape.dtype, shape.device) if shape.states else None
        self._allocate(0, 0)
        self._parked: ParkedSamples[_Kept] = ParkedSamples(lambda memory: None)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    def addresses(self) -> tuple[int, ...]:
        return *(cache.data_ptr() for cache in self.tensors()), *self.mask.shape

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Makes room for `num_positions` in each of `num_slots`. The first `num_used` slots keep their content."""
        num_slots = min(num_slots, self._max_slots)
        num_positions = min(read_length(num_positions), self._max_positions)
        if num_slots <= self.num_slots and num_positions <= self.capacity:
            return
        if not num_used:
            num_slots, num_positions = max(num_slots, self.num_slots), max(num_positions, self.capacity)
            self._allocate(0, 0)  # first, so old and new memory never exist together
        before, mask = self._by_position(), self.mask
        self._allocate(
            _grown(num_slots, self.num_slots, 2 * self.num_slots, self._max_slots),
            _grown(num_positions, self.capacity, round_up(self.capacity * 3 // 2), self._max_positions),
        )
        for new, old in zip(self._by_position(), before, strict=True):
            new[:, :num_used, :, : old.shape[3]] = old[:, :num_used]
        if self.states:
            self.states.hold(self.num_slots, num_used)
        self.mask[:num_used, :, : mask.shape[2]] = mask[:num_used]

    def release(self) -> None:
        self.parked.clear()
        self._allocate(0, 0)
        if self.states:
            self.states.hold(0)

    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        return len(waiting)

    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> Entered:
        entered, num_parked = Entered({}, []), 0
        if self.states:
            self.states.begin(first_slot, first_slot + len(samples))
        for slot, sample in enumerate(samples, start=first_slot):
            head = sample.context[:-1]
            if parked := self._parked.take(sample):
                first = len(parked.head)
                num_parked += first
                for cache, kept in zip(self._by_position(), parked.memory.of_tokens, strict=True):
                    cache[:, slot, :, :first] = kept
                if self.states and parked.memory.states:
                    self.states.resume(slot, parked.memory.states)
                entered.suffixes.append(Suffix(slot, first, head[first:]))
            else:
                entered.heads.setdefault(head, []).append((slot, 0))
        lengths = [len(sample.prompt) + len(sample.tokens) - 1 for sample in samples]
        num_tokens = uploaded(lengths, self.mask.device)
        beyond = torch.arange(self.capacity, device=self.mask.device) >= num_tokens[:, None, None]
        self.mask[first_slot : first_slot + len(samples)] = self.mask.new_zeros(()).masked_fill(beyond, -torch.inf)
        return entered._replace(num_parked_tokens=num_parked)

    def extend(self, slot: int, position: int) -> int:
        return self._max_positions

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        to, by = uploaded([destinations, sources], self.mask.device)
        for cache in self._by_position():
            cache[:, to, :, :num_positions] = cache[:, by, :, :num_positions]
        if self.states:
            self.states.move(sources, destinations)
        self.mask[to, :, :num_positions] = self.mask[by, :, :num_positions]

    def free(self, first: int, end: int) -> None:
        """Does nothing, since the memory of a slot stays for the next sample."""

    def forget_prompts(self) -> None:
        """Does nothing, since slots share nothing."""

    def park(self, slot: int, sample: Sample) -> None:
        count = len(sample.context) - 1
        of_tokens = tuple(cache[:, slot, :, :count].clone() for cache in self._by_position())
        self.parked.add(sample, _Kept(of_tokens, self.states.parked(slot) if self.states else None))
        while self.parked.num_tokens > self.num_slots * self.capacity:
            self.parked.evict()

    def routed(self, slot: int, first: int, end: int) -> Tensor:
        return self.routing[0][:, slot, 0, first:end].transpose(0, 1).clone()

    def keep_routing(self, layer: int, experts: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Stores the experts of one token at each (slot, position)."""
        (buffer,) = self.routing
        rows = slots * self.capacity + positions
        buffer[layer].view(-1, experts.shape[-1]).index_copy_(0, rows, experts.to(buffer.dtype))

    @property
    def parked(self) -> "ParkedSamples[_Kept]":
        return self._parked

    def _prefill_attention(
        self, keepers: Sequence[Sequence[Keeper]], lengths: Sequence[int], width: int
    ) -> PrefillAttention:
        slots = [(slot, row) for row, kept in enumerate(keepers) for slot, _ in kept]
        return _SlotPrefillAttention(self, uploaded(slots, self.keys.device), width)

    def _suffix_attention(self, suffixes: Sequence[Suffix], width: int) -> PrefillAttention:
        return _SlotSuffixAttention(self, suffixes, width)

    def _decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention:
        return _DecodeAttention(self, positions, num_positions)

    def recorded_length(self, num_positions: int) -> int:
        return rounded(num_positions, _RECORDED_SIZES)

    def metrics(self) -> dict[str, float]:
        return self.parked.metrics()

    def _allocate(self, num_slots: int, capacity: int) -> None:
        num_layers, num_kv_heads, shape = len(self.keys), self.attention.num_kv_heads, self.attention
        sizes = (num_layers, num_slots, num_kv_heads, capacity)
        self.keys = self.keys.new_zeros(*sizes, shape.head_dim)
        self.values = (
            self.keys[..., : shape.value_dim] if shape.latent else self.keys.new_zeros(*sizes, shape.value_dim)
        )
        self.capacity = capacity
        self.mask = self.keys.new_full((num_slots, num_kv_heads, capacity), -torch.inf)
        self.kept = (self.keys,) if shape.latent else (self.keys, self.values)
        self.routing: tuple[Tensor, ...] = ()
        if self._routing_shape is not None:
            self.routing = (self._routing_shape.new_buffer(num_slots, 1, capacity, device=self.keys.device),)
        rows = torch.arange(num_slots * num_kv_heads, device=self.keys.device)
        self.heads = rows.view(num_slots, num_kv_heads)
        """Number of each slot's head among those of all slots."""
        self.first_positions = self.heads * capacity
        """Start of each slot's and head's positions with the first three axes flattened, shape [slots, kv_heads]."""
        self.rows = tuple(cache.view(num_layers, len(rows) * capacity, cache.shape[-1]).unbind() for cache in self.kept)
        """For each cached tensor, its layers flattened in this way."""


class _Kept(NamedTuple):
    """Content of a parked sample."""

    of_tokens: tuple[Tensor, ...]
    states: tuple[Tensor, Tensor] | None


def _grown(wanted: int, present: int, enough: int, limit: int) -> int:
    return present if wanted <= present else min(max(wanted, enough), limit)


def round_up(num_positions: int) -> int:
    """Rounds up to a length with aligned rows, as needed by vector units and attention kernels."""
    return -(-num_positions // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def read_length(num_positions: int) -> int:
    """Returns the number of positions read by decoding if `num_positions` are needed. The capacity must cover them."""
    return round_up(max(num_positions, _MIN_READ))


class _SlotPrefillAttention(PrefillAttention):
    """Prefill attention. `slots` [copies, 2] are pairs of a slot and the head for it. Samples with equal contexts share
    one."""

    def __init__(self, cache: SlotCache, slots: Tensor, width: int) -> None:
        super().__init__(width, cache.attention)
        self._cache = cache
        self._slots, self._heads = slots.unbind(-1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._store(self._cache.kept, layer, (keys, values))

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        self._store(self._cache.routing, layer, [experts[:, None]])

    def _store(self, buffers: Sequence[Tensor], layer: int, new: Sequence[Tensor]) -> None:
        for buffer, tokens in zip(buffers, new, strict=False):  # latents have only one buffer
            buffer[layer][self._slots, :, : self._width] = self._by_head(tokens)[self._heads].to(buffer.dtype)


class _SlotSuffixAttention(SuffixAttention):
    def __init__(self, cache: SlotCache, suffixes: Sequence[Suffix], width: int) -> None:
        self._num_read = min(read_length(max(suffix.end for suffix in suffixes)), cache.capacity)
        super().__init__(suffixes, width, cache.attention, self._num_read, cache.keys)
        self._cache = cache
        self._slots = uploaded([suffix.slot for suffix in suffixes], cache.keys.device)
        tokens = [row * width + index for row, suffix in enumerate(suffixes) for index in range(len(suffix.tokens))]
        places = [(suffix.slot, position) for suffix in suffixes for position in range(suffix.first, suffix.end)]
        self._tokens = uploaded(tokens, cache.keys.device)
        self._places = uploaded(places, cache.keys.device).unbind(1)
        slots, positions = self._places
        self._written = (cache.first_positions[slots] + positions[:, None]).view(-1)

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        self._cache.keep_routing(layer, experts.index_select(0, self._tokens), *self._places)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for rows, new in zip(self._cache.rows, (keys, values), strict=False):
            rows[layer].index_copy_(0, self._written, new.index_select(0, self._tokens).flatten(0, 1))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            buffer[layer, self._slots, :, : self._num_read] for buffer in (self._cache.keys, self._cache.values)
        )
        return keys, values


class _DecodeAttention:
    """Reads all slots up to the same position, at `num_positions` or slightly above."""

    reads_cache = True
    states: StepStates | None = None

    def __init__(self, cache: SlotCache, positions: Tensor, num_positions: int) -> None:
        num_slots = len(positions)
        self._cache, self._positions = cache, positions
        num_positions = min(read_length(num_positions), cache.capacity)
        self._written = (cache.first_positions[:num_slots] + positions[:, None]).view(-1)
        cache.mask.view(-1).index_fill_(0, self._written, 0)
        bias = cache.mask[:num_slots, :, :num_positions]
        self._bias_of = window_biases(cache.attention, lambda window: self._within(bias, window)[:, None])
        self._stores, self._shape = cache.rows, cache.attention
        buffers = (cache.keys, cache.values)
        self._reads = [buffer[:, :num_slots].flatten(1, 2)[:, :, :num_positions].unbind() for buffer in buffers]

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        for stores, new in zip(self._stores, (keys, values), strict=False):
            stores[layer].index_copy_(0, self._written, new.reshape(-1, new.shape[-1]))
        return self.attend(layer, queries, sinks)

    def written(self, layer: int) -> Written:
        keys, values = (stores[layer] for stores in self._stores)
        head_dim = keys.shape[-1]
        capacity = self._cache.capacity  # a slot's first head is one block
        return Written(keys, values, self._cache.heads, self._positions, capacity, head_dim, capacity * head_dim)

    def attend(self, layer: int, queries: Tensor, sinks: Tensor | None = None) -> Tensor:
        head_dim = queries.shape[-1]
        k, v = (reads[layer] for reads in self._reads)
        q = queries.reshape(len(k), -1, head_dim)
        if sinks is not None:
            sinks = sinks.view(self._shape.num_kv_heads, -1, 1).repeat(len(queries), 1, 1)
        bias = self._bias_of[self._shape.window(layer)]
        return _attend(q, k, v, bias, self._shape, sinks).view(len(queries), -1)

    def _within(self, bias: Tensor, window: int | None) -> Tensor:
        """Returns `bias` [slots, kv_heads, positions] with -inf before the window too, shape [slots * kv_heads,
        positions]."""
        if window is not None:
            before = self._positions[:, None] - torch.arange(bias.size(-1), device=bias.device) >= window
            bias = bias.masked_fill(before[:, None], -torch.inf)
        return bias.flatten(0, 1)

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        slots = torch.arange(len(self._positions), device=self._positions.device)
        self._cache.keep_routing(layer, experts, slots, self._positions)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:
    """Attends with q [n, group, head_dim] to k [n, positions, head_dim] and v [n, positions, value_dim].

    The rows of a group are the heads sharing a KV head. `bias` is [n, 1, positions] and `sinks` [n, group, 1]. In
    float32 two batched products are faster on CPUs than the fused kernel, which has a cost per slot and head. Half
    precision takes the fused kernel, because its scores stay in float32.
    """
    if q.dtype != torch.float32 or shape.softcap is not None or sinks is not None:
        q, k, v, bias = (x[:, None] for x in (q, k, v, bias))
        of_rows = None if sinks is None else sinks[:, None]
        return attend(q, k, v, bias, scale=shape.scale, softcap=shape.softcap, sinks=of_rows)[:, 0]
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape.scale)
    return torch.bmm(torch.softmax(scores, -1), v)
