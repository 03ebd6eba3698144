"""Keys and values of the running samples, one slot each, and attention over them."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LENGTH_MULTIPLE = 8
_MIN_READ = 16
"""Positions: shorter rows than a vector make softmax and products several times slower on CPU."""


class KvCache:
    """Keys and values [layers, slots, kv_heads, capacity, head_dim]; running samples fill the first slots.

    Memory follows what was needed: `reserve` makes slots that fall short twice as many or more, and positions half as
    many more or more (what is read lies denser than after doubling), up to `max_slots` and `max_positions`. Every
    entry is finite, written or not, so that a masked one contributes exactly zero. `mask` [slots, kv_heads, capacity]
    is what attention adds to scores: 0 where a slot holds a token, else -inf.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_slots: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self._max_slots = max_slots
        self._max_positions = round_up(max_positions)
        self.keys = torch.zeros(num_layers, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._allocate(0, 0)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Make room for `num_positions` in each of `num_slots`; what the first `num_used` slots hold stays."""
        num_slots, num_positions = min(num_slots, self._max_slots), min(round_up(num_positions), self._max_positions)
        if num_slots <= self.num_slots and num_positions <= self.capacity:
            return
        if not num_used:
            num_slots, num_positions = max(num_slots, self.num_slots), max(num_positions, self.capacity)
            self.release()  # first, so that old and new memory never exist together
        keys, values, mask = self.keys, self.values, self.mask
        self._allocate(
            _grown(num_slots, self.num_slots, 2 * self.num_slots, self._max_slots),
            _grown(num_positions, self.capacity, round_up(self.capacity * 3 // 2), self._max_positions),
        )
        for new, old in ((self.keys, keys), (self.values, values)):
            new[:, :num_used, :, : old.shape[3]] = old[:, :num_used]
        self.mask[:num_used, :, : mask.shape[2]] = mask[:num_used]

    def release(self) -> None:
        """Give the memory back."""
        self._allocate(0, 0)

    def occupy(self, first_slot: int, num_tokens: Tensor) -> None:
        """Slots from `first_slot` on hold `num_tokens` [slots] each, which are yet to be stored, and nothing else."""
        beyond = torch.arange(self.capacity, device=self.mask.device) >= num_tokens[:, None, None]
        self.mask[first_slot : first_slot + len(num_tokens)] = self.mask.new_zeros(()).masked_fill(beyond, -torch.inf)

    def move(self, sources: Tensor, destinations: Tensor, num_positions: int) -> None:
        """Copy slots `sources` over slots `destinations`, up to `num_positions`."""
        for cache in (self.keys, self.values):
            cache[:, destinations, :, :num_positions] = cache[:, sources, :, :num_positions]
        self.mask[destinations, :, :num_positions] = self.mask[sources, :, :num_positions]

    def _allocate(self, num_slots: int, capacity: int) -> None:
        num_layers, _, num_kv_heads, _, head_dim = self.keys.shape
        self.keys = self.keys.new_zeros(num_layers, num_slots, num_kv_heads, capacity, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.mask = self.keys.new_full((num_slots, num_kv_heads, capacity), -torch.inf)
        rows = torch.arange(num_slots * num_kv_heads, device=self.keys.device)
        self.first_positions = rows.view(num_slots, num_kv_heads) * capacity
        """[slots, kv_heads] where each slot's and head's positions start when the first three axes are flattened."""
        shape = (num_layers, len(rows) * capacity, head_dim)
        self.rows = tuple(buffer.view(shape).unbind() for buffer in (self.keys, self.values))
        """Keys and values of each layer, flattened so."""


def _grown(wanted: int, present: int, enough: int, limit: int) -> int:
    return present if wanted <= present else min(max(wanted, enough), limit)


def round_up(num_positions: int) -> int:
    """The next length whose rows stay aligned for vector units and attention kernels."""
    return -(-num_positions // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def read_length(num_positions: int) -> int:
    """How many positions decoding reads where `num_positions` are needed: capacity for them lets it."""
    return round_up(max(num_positions, _MIN_READ))


class PrefillAttention:
    """Causal attention within prompts of `width` tokens (shorter ones padded on the right), written to the cache.

    `slots` [copies, 2] names a slot and the prompt it receives: samples with equal prompts share one.
    """

    def __init__(self, cache: KvCache, slots: Tensor, width: int) -> None:
        self._cache, self._width = cache, width
        self._slots, self._prompts = slots.unbind(-1)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head_dim] from [tokens, heads, head_dim] and (keys, values) [tokens, kv_heads, head_dim]."""
        self.store(layer, keys, values)
        q, k, v = self._by_prompt(queries), self._by_prompt(keys), self._by_prompt(values)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).reshape(len(queries), -1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the prompts' keys and values [tokens, kv_heads, head_dim] into their slots."""
        for cache, new in ((self._cache.keys, keys), (self._cache.values, values)):
            cache[layer][self._slots, :, : self._width] = self._by_prompt(new)[self._prompts]

    def _by_prompt(self, heads: Tensor) -> Tensor:
        """[prompts, heads, width, head_dim]."""
        return heads.view(-1, self._width, *heads.shape[1:]).transpose(1, 2)


class DecodeAttention:
    """One new token in each of the first `len(positions)` slots, attending to its slot up to itself.

    `positions` [slots] is where each token stands; `num_positions` bounds them (exclusive) and what is read.
    """

    def __init__(self, cache: KvCache, positions: Tensor, num_positions: int) -> None:
        num_slots = len(positions)
        num_positions = min(read_length(num_positions), cache.capacity)
        self._written = (cache.first_positions[:num_slots] + positions[:, None]).view(-1)
        cache.mask.view(-1).index_fill_(0, self._written, 0)
        self._bias = cache.mask[:num_slots].flatten(0, 1)[:, None, :num_positions]
        self._stores = cache.rows
        buffers = (cache.keys, cache.values)
        self._reads = [buffer[:, :num_slots].flatten(1, 2)[:, :, :num_positions].unbind() for buffer in buffers]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads * head_dim] from [tokens, heads, head_dim] and (keys, values) [tokens, kv_heads, head_dim]."""
        head_dim = queries.shape[-1]
        for stores, new in zip(self._stores, (keys, values), strict=True):
            stores[layer].index_copy_(0, self._written, new.reshape(-1, head_dim))
        k, v = (reads[layer] for reads in self._reads)
        q = queries.reshape(len(k), -1, head_dim)
        return _attend(q, k, v, self._bias).view(len(queries), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of q [n, group, head_dim] over k, v [n, positions, head_dim]; the heads that share a KV head are rows.

    `bias` [n, 1, positions]. In float32 two batched products measure faster on CPU than the fused kernel, which
    pays per slot and head; half precision takes the fused kernel, whose scores stay in float32.
    """
    scale = q.shape[-1] ** -0.5
    if q.dtype != torch.float32:
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], bias[:, None], scale=scale)[:, 0]
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), v)
