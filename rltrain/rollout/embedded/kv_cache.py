"""Keys and values of the running requests, one slot each, and attention over them."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LENGTH_MULTIPLE = 8


class KvCache:
    """Keys and values [layers, slots, kv_heads, capacity, head_dim]; running requests fill the first slots.

    Memory follows what was needed: `reserve` at least doubles what falls short, up to `max_slots` and `max_positions`
    (per slot). Every entry is finite, written or not, so that a masked one contributes exactly zero.
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
        self.values = torch.zeros_like(self.keys)
        self.first_positions = torch.empty(0, num_kv_heads, dtype=torch.int64, device=device)
        """[slots, kv_heads] where each slot's and head's positions start when the first three axes are flattened."""

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Make room for `num_positions` in each of `num_slots`; what the first `num_used` slots hold stays."""
        if num_slots <= self.num_slots and num_positions <= self.capacity:
            return
        if not num_used:
            num_slots, num_positions = max(num_slots, self.num_slots), max(num_positions, self.capacity)
            self.release()  # first, so that old and new memory never exist together
        keys, values = self.keys, self.values
        self._allocate(
            _grown(num_slots, self.num_slots, self._max_slots),
            _grown(round_up(num_positions), self.capacity, self._max_positions),
        )
        for new, old in ((self.keys, keys), (self.values, values)):
            new[:, :num_used, :, : old.shape[3]] = old[:, :num_used]

    def release(self) -> None:
        """Give the memory back."""
        self._allocate(0, 0)

    def move(self, sources: Tensor, destinations: Tensor, num_positions: int) -> None:
        """Copy slots `sources` over slots `destinations`, up to `num_positions`."""
        for cache in (self.keys, self.values):
            cache[:, destinations, :, :num_positions] = cache[:, sources, :, :num_positions]

    def _allocate(self, num_slots: int, capacity: int) -> None:
        num_layers, _, num_kv_heads, _, head_dim = self.keys.shape
        self.keys = self.keys.new_zeros(num_layers, num_slots, num_kv_heads, capacity, head_dim)
        self.values = torch.zeros_like(self.keys)
        rows = torch.arange(num_slots * num_kv_heads, device=self.keys.device)
        self.first_positions = rows.view(num_slots, num_kv_heads) * capacity


def _grown(wanted: int, present: int, limit: int) -> int:
    return present if wanted <= present else min(max(wanted, 2 * present), limit)


def round_up(num_positions: int) -> int:
    """The next length whose rows stay aligned for vector units and attention kernels."""
    return -(-num_positions // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


class PrefillAttention:
    """Causal attention within prompts of `width` tokens (shorter ones padded on the right), written to the cache.

    `slots` [copies, 2] names a slot and the prompt it receives: requests with equal prompts share one.
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

    `positions` [slots] is where each token stands; `num_positions` bounds them (exclusive) and is all that is read.
    """

    def __init__(self, cache: KvCache, positions: Tensor, num_positions: int) -> None:
        num_slots, head_dim = len(positions), cache.keys.shape[-1]
        num_positions = min(round_up(num_positions), cache.capacity)
        self._written = (cache.first_positions[:num_slots] + positions[:, None]).view(-1)
        beyond = torch.arange(num_positions, device=positions.device) > positions[:, None]
        bias = torch.zeros(beyond.shape, dtype=cache.keys.dtype, device=beyond.device)
        bias.masked_fill_(beyond, float("-inf"))
        self._bias = bias[:, None].expand(-1, cache.num_kv_heads, -1).reshape(-1, 1, num_positions)
        # Views of each layer: where new tokens are stored, and what is read.
        buffers = (cache.keys, cache.values)
        self._stores = [buffer.view(cache.num_layers, -1, head_dim).unbind() for buffer in buffers]
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
