"""A KV cache of blocks within a budget, and attention over the blocks."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import ConfigError
from rltrain.models.attention import attend
from rltrain.reshard.copy_table import Zeros
from rltrain.rollout.embedded.block_tables import BlockTables, EnteredSample, KvBudget, blocks_of, num_blocks
from rltrain.rollout.embedded.kv_cache import (
    AttentionShape,
    CacheShape,
    DecodeAttention,
    Entered,
    Head,
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
    unseen_bias,
    uploaded,
    window_biases,
)
from rltrain.rollout.sample import Sample

# Attention of decode steps over keys and values in blocks.

_RECORDED_SIZES = 4
"""Recorded sizes (numbers of blocks read) between two powers of two."""


class Blocks(Protocol):
    """The tensors read and written by attention. All keep their addresses from step to step."""

    shape: AttentionShape
    block_tokens: int
    capacity: int
    """Positions of the longest sample, rounded up to whole blocks."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, shape [blocks, block_tokens, kv_heads, head_dim or value_dim]. With latent
    attention the values are views of the keys."""
    routing: tuple[Tensor, ...]
    """Experts, shape [layers, blocks, block_tokens, top_k], if they are recorded."""
    table: Tensor
    """The blocks of each slot, int32, shape [slots, capacity / block_tokens]."""
    offsets: Tensor
    """The numbers 0, 1, 2, ..., int32, shape [max(slots, capacity) + 1]."""


class BlockAttention:
    """Stores one new token at its position in each of the first `len(positions)` slots. Subclasses attend to the
    slots."""

    name: str
    block_tokens: int
    reads_cache = True
    states: StepStates | None = None

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        self._table, self._positions = blocks.table[: len(positions)], positions
        self._layers, self._shape, self._routing = blocks.layers, blocks.shape, blocks.routing

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        """Returns the length of a recorded step (see KvCache)."""
        raise NotImplementedError

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        stored_keys, stored_values = self._layers[layer]
        stored_keys.flatten(0, 1).index_copy_(0, self._written, keys)
        if not self._shape.latent:
            stored_values.flatten(0, 1).index_copy_(0, self._written, values)
        return self.attend(layer, queries, sinks)

    def written(self, layer: int) -> Written:
        """Returns the places of the tokens (see DecodeAttention)."""
        keys, values = self._layers[layer]
        return Written(keys, values, self._table, self._positions, keys.size(1), keys.stride(1), keys.stride(2))

    def attend(self, layer: int, queries: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attends to stored tokens (see DecodeAttention)."""
        keys, values = self._layers[layer]
        return self._attend(keys, values, queries, self._shape.window(layer), sinks)

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """Keeps the experts of the tokens (see DecodeAttention)."""
        (buffer,) = self._routing
        buffer[layer].flatten(0, 1).index_copy_(0, self._written, experts.to(buffer.dtype))

    @cached_property
    def _written(self) -> Tensor:
        """The row of each token among those of all blocks. Kernels find it by themselves."""
        size = self._layers[0][0].size(1)
        holding = self._table.gather(1, (self._positions // size)[:, None])[:, 0]
        return holding * size + self._positions % size

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Returns [tokens, heads * value_dim] from a layer's blocks and queries of shape [tokens, heads, head_dim]."""
        raise NotImplementedError


class GatheredBlocks(BlockAttention):
    """Copies each slot's blocks, up to the longest slot, into contiguous rows first. It works on every device and
    dtype."""

    name = "blocks, gathered before attention"
    block_tokens = 32
    """Short blocks waste less: half a block per sample. Copies move whole blocks, which should span a few cache
    lines."""

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        super().__init__(blocks, positions, num_positions)
        num_read = min(-(-num_positions // blocks.block_tokens), blocks.table.shape[1])
        self._read = blocks.table[: len(positions), :num_read].reshape(-1)
        read, like = blocks.offsets[: num_read * blocks.block_tokens], blocks.layers[0][0]
        self._bias_of = window_biases(
            self._shape, lambda window: unseen_bias(positions[:, None], read, window, like)[:, None]
        )

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        return rounded(-(-num_positions // blocks.block_tokens), _RECORDED_SIZES) * blocks.block_tokens

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        num_slots, num_kv_heads = len(queries), self._shape.num_kv_heads
        k = self._gathered(keys, num_slots)
        v = k[..., : self._shape.value_dim] if self._shape.latent else self._gathered(values, num_slots)
        q = queries.reshape(num_slots, num_kv_heads, -1, queries.shape[-1])  # rows are the heads sharing a KV head
        shape = self._shape
        of_rows = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        attended = attend(q, k, v, self._bias_of[window], scale=shape.scale, softcap=shape.softcap, sinks=of_rows)
        return attended.reshape(num_slots, -1)

    def _gathered(self, stored: Tensor, num_slots: int) -> Tensor:
        """Returns the copied blocks, shape [slots, kv_heads, positions, elements]."""
        return stored.index_select(0, self._read).view(num_slots, -1, *stored.shape[2:]).transpose(1, 2)


class VarlenBlocks(BlockAttention):
    """Torch's flash attention over sequences of different lengths. It follows block tables and reads no further."""

    name = "blocks, by flash attention (torch.nn.attention.varlen)"
    block_tokens = 256
    """FlashAttention 2 accepts only multiples of this."""

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        super().__init__(blocks, positions, num_positions)
        from torch.nn.attention.varlen import varlen_attn  # missing in some versions of torch

        num_slots = len(positions)
        self._attention: Callable[..., Any] = varlen_attn
        self._lengths = (positions + 1).int()
        self._first_queries = blocks.offsets[: num_slots + 1]
        self._first_keys = self._first_queries * blocks.capacity
        self._capacity = blocks.capacity

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        return blocks.capacity

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        attended: Tensor = self._attention(
            queries,
            keys,
            values,
            self._first_queries,
            self._first_keys,
            1,
            self._capacity,
            scale=self._shape.scale,
            enable_gqa=queries.shape[1] != keys.shape[2],
            seqused_k=self._lengths,
            block_table=self._table,
            num_splits=1,  # other numbers skip rows of keys in blocks (pytorch#194167)
        )
        return attended.reshape(len(queries), -1)


class KernelBlocks(BlockAttention):
    """rltrain's Triton kernel. It needs only Triton, supports float32, windows, soft caps and sinks, and reads only the
    blocks in use."""

    name = "blocks, by rltrain's Triton kernel"
    block_tokens = 64
    """Tokens held by a program of the kernel at a time."""

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        super().__init__(blocks, positions, num_positions)
        from rltrain.rollout.embedded.triton_kernels import attend_blocks  # needs Triton

        self._attention: Callable[..., Tensor] = attend_blocks

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        return blocks.capacity

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        shape, places = self._shape, (self._table, self._positions)
        attended = self._attention(
            queries, keys, values, *places, shape.scale, window=window, softcap=shape.softcap, sinks=sinks
        )
        return attended.view(len(queries), -1)


class _Sample:
    """Blocks of a few short sequences, for trying out an attention."""

    def __init__(self, kind: type[BlockAttention], shape: AttentionShape, like: Tensor) -> None:
        self.shape = shape
        self.routing: tuple[Tensor, ...] = ()
        self.block_tokens = kind.block_tokens
        self.capacity = 2 * kind.block_tokens
        sizes = (7, kind.block_tokens, shape.num_kv_heads)
        generator = torch.Generator().manual_seed(0)
        keys, values = (
            torch.randn(*sizes, elements, generator=generator).to(like)
            for elements in (shape.head_dim, shape.value_dim)
        )
        self.layers = [(keys, values)] * (len(shape.windows.layers) if shape.windows else 1)
        self.table = torch.tensor([[3, 5], [1, 6], [4, 2]], dtype=torch.int32, device=like.device)
        self.offsets = torch.arange(self.capacity + 1, dtype=torch.int32, device=like.device)


@torch.inference_mode()
def difference(kind: type[BlockAttention], shape: AttentionShape, like: Tensor) -> float:
    """Returns the largest difference between `kind` and GatheredBlocks on random input of the dtype and device of
    `like`, in a layer with each window of the model.

    Raises any error of `kind`.
    """
    positions = torch.tensor([0, kind.block_tokens, 2 * kind.block_tokens - 7], device=like.device)
    num_layers = len(shape.windows.layers) if shape.windows else 1
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(3, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator).to(like)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    sinks = q[0, :, 0].contiguous() if shape.sinks else None
    found, expected = (
        torch.stack(
            [
                attention(_Sample(kind, shape, like), positions, 2 * kind.block_tokens)(layer, q, k, v, sinks)
                for layer in {shape.window(layer): layer for layer in range(num_layers)}.values()
            ]
        )
        for attention in (kind, GatheredBlocks)
    )
    return float((found.float() - expected.float()).abs().max().nan_to_num(torch.inf))


def choose_attention(shape: AttentionShape, like: Tensor) -> tuple[type[BlockAttention], str]:
    """Returns (the fastest working kind, a description with the reasons against others).

    On CUDA it tries the kernels, because they depend on torch, the GPU and the dtype of `like`. Latents need
    GatheredBlocks. Only rltrain's own kernel supports windows, soft-capped scores and sinks.
    """
    reasons: list[str] = []
    plain = shape.windows is None and shape.softcap is None and not shape.sinks
    kinds: tuple[type[BlockAttention], ...] = (VarlenBlocks, KernelBlocks) if plain else (KernelBlocks,)
    for kind in kinds if like.is_cuda and not shape.latent else ():
        reason = _why_not(kind, shape, like)
        if not reason:
            return kind, "; not ".join([kind.name, *reasons])
        reasons.append(f"{kind.name}: {reason}")
    return GatheredBlocks, "; not ".join([GatheredBlocks.name, *reasons])


def _why_not(kind: type[BlockAttention], shape: AttentionShape, like: Tensor) -> str:
    """Returns the reason against `kind`, or an empty string if it works."""
    try:
        error = difference(kind, shape, like)
    except Exception as refusal:  # any failure of a version, GPU, compiler or driver
        return f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return "" if error < 0.05 else f"it is off by {error:.3g}"


# The KV cache of blocks.


class BlockCache(KvCache):
    """Keys and values in tensors of shape [layers, blocks, block_tokens, kv_heads, head_dim], or latents in one such
    tensor.

    The budget determines the number of blocks. The memory is allocated once, at the first need, and never grows or
    moves until `release`. All entries are finite even before they are written, so masked entries contribute exactly
    zero. `agree` returns the least of the numbers given by the engine's ranks. The budget also covers per-sample states
    of all slots. `zeros` allocates the memory on another way than torch.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        budget: KvBudget,
        attention: type[BlockAttention],
        agree: Callable[[int], int],
        zeros: Zeros | None = None,
    ) -> None:
        self._zeros = zeros
        self.block_tokens = attention.block_tokens
        self.capacity = blocks_of(shape.max_positions, self.block_tokens) * self.block_tokens
        max_slots, device = shape.max_slots, shape.device
        self._max_slots, self._max_positions = max_slots, shape.max_positions
        self._budget, self._attention, self._agree = budget, attention, agree
        self.table = torch.zeros(max_slots, self.capacity // self.block_tokens, dtype=torch.int32, device=device)
        self.offsets = torch.arange(max(max_slots, self.capacity) + 1, dtype=torch.int32, device=device)
        self.shape = shape.attention
        self._num_layers, self._routing_shape = shape.num_layers, shape.routing
        self.states = SampleStates(shape.states, shape.dtype, device, zeros) if shape.states else None
        self.allows_ahead = self.states is None
        """A step in flight would move the states of a sample past the token with which it returns."""
        self._hold(torch.zeros(0, dtype=shape.dtype, device=device), 0)
        self._tables: BlockTables | None = None
        self._none_parked: ParkedSamples[Any] = ParkedSamples(lambda memory: None)
        self._shown: np.ndarray = np.zeros(())
        """The rows last copied to `table`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        routing = self._routing_shape.token_bytes if self._routing_shape else 0
        return self.block_tokens * (self._num_layers * self.shape.token_elements * self._keys.itemsize + routing)

    @property
    def states_bytes(self) -> int:
        """Bytes of the states of samples in all slots."""
        return self._max_slots * self.states.shape.sample_bytes(self._keys.dtype) if self.states else 0

    def addresses(self) -> tuple[int, ...]:
        return tuple(cache.data_ptr() for cache in self.tensors())

    def reserve(self, num_slots: int, num_positions: int, *, num_used: int) -> None:
        """Brings the block table on the device up to date."""
        rows = self._allocated().rows
        if not np.array_equal(rows, self._shown):
            self._shown = rows.copy()
            self.table.copy_(uploaded(self._shown, self.table.device))

    def release(self) -> None:
        self._tables, self._shown = None, np.zeros(())
        self._hold(self._keys, 0)
        if self.states:
            self.states.hold(0)

    def num_admissible(self, waiting: Sequence[Sample], num_wanted: int, num_running: int, version: int) -> int:
        return self._allocated().num_admissible(waiting, num_wanted, num_running, version)

    def enter(self, first_slot: int, samples: Sequence[Sample], version: int) -> Entered:
        entries = self._allocated().enter(first_slot, samples, version)
        if self.states:
            self.states.begin(first_slot, first_slot + len(samples))
            for slot, entry in enumerate(entries, start=first_slot):
                if entry.states:
                    self.states.resume(slot, entry.states)
        # Only tokens of prompts are copied. The sample beside may have failed in a step not read yet and stored NaN.
        within = [np.arange((len(sample.prompt) - 1) % self.block_tokens) for sample in samples]
        copies = [
            np.add.outer(np.array(entry.copy) * self.block_tokens, places)
            for entry, places in zip(entries, within, strict=True)
            if entry.copy
        ]
        if copies:
            sources, destinations = uploaded(np.concatenate(copies, 1), self.table.device)
            for cache in self._by_position():
                for layer in cache.flatten(1, 2):  # one by one to save memory
                    layer.index_copy_(0, destinations, layer.index_select(0, sources))
        return _work([sample.context[:-1] for sample in samples], entries, first_slot)

    def extend(self, slot: int, position: int) -> int:
        return self._allocated().extend(slot, position)

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_positions: int) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            self._allocated().move(source, destination)
        if self.states:
            self.states.move(sources, destinations)

    def free(self, first: int, end: int) -> None:
        if self._tables is not None:
            for slot in range(first, end):
                self._tables.free(slot)

    def erase(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        rows = np.concatenate([self._rows(*at) for at in zip(slots, np.array(positions)[:, None], strict=True)])
        erased = uploaded(rows, self.table.device)
        for cache in self.kept:
            cache.flatten(1, 2).index_fill_(1, erased, 0)

    def forget_prompts(self) -> None:
        if self._tables is not None:
            self._tables.forget_prompts()

    def park(self, slot: int, sample: Sample) -> None:
        self._allocated().park(slot, sample, self.states.parked(slot) if self.states else None)

    def routed(self, slot: int, first: int, end: int) -> Tensor:
        rows = uploaded(self._rows(slot, np.arange(first, end)), self.table.device)
        return self.routing[0].flatten(1, 2).index_select(1, rows).transpose(0, 1)

    @property
    def parked(self) -> ParkedSamples[Any]:
        return self._tables.parked if self._tables else self._none_parked

    def _prefill_attention(
        self, keepers: Sequence[Sequence[Keeper]], lengths: Sequence[int], width: int
    ) -> PrefillAttention:
        spans = [
            (row * width + first, slot, first, length)
            for row, (kept, length) in enumerate(zip(keepers, lengths, strict=True))
            for slot, first in kept
        ]
        return _PrefillAttention(self, self._moved(spans), width)

    def _suffix_attention(self, suffixes: Sequence[Suffix], width: int) -> PrefillAttention:
        spans = [
            (row * width + max(first - suffix.first, 0), slot, max(first, suffix.first), suffix.end)
            for row, suffix in enumerate(suffixes)
            for slot, first in ((suffix.slot, suffix.first), *suffix.others)
            if first < suffix.end
        ]
        num_read = blocks_of(max(suffix.end for suffix in suffixes), self.block_tokens)
        rows = self._allocated().rows[[suffix.slot for suffix in suffixes], :num_read]
        blocks = uploaded(rows, self.table.device)
        return _SuffixAttention(self, self._moved(spans), blocks, suffixes, width)

    def _decode_attention(self, positions: Tensor, num_positions: int) -> DecodeAttention:
        return self._attention(self, positions, num_positions)

    def recorded_length(self, num_positions: int) -> int:
        return self._attention.recorded_length(self, num_positions)

    def metrics(self) -> dict[str, float]:
        if self._tables is None:
            return {"rollout/kv_cache_peak": 0.0}
        pool = self._tables.pool
        peak, pool.most_used = pool.most_used, pool.num_used
        return {"rollout/kv_cache_peak": peak / (pool.num_blocks - 1), **self.parked.metrics()}

    def num_blocks(self) -> int:
        """Returns the number of blocks within the budget. Raises ConfigError if they cannot hold the longest sample.

        Collective over: the engine's tensor-parallel group.
        """
        return num_blocks(
            self._budget,
            self._agree(self._budget.num_bytes()),
            states_bytes=self.states_bytes,
            block_bytes=self.block_bytes,
            block_tokens=self.block_tokens,
            max_context_tokens=self._max_positions,
            max_running_requests=self._max_slots,
            is_cut=not self.shape.latent,
        )

    def _moved(self, spans: Sequence[tuple[int, int, int, int]]) -> Tensor:
        """Returns [2, tokens]: indices of tokens in a pass, and their destinations in the flattened blocks.

        A span is (first token in the pass, slot, first position, end position).
        """
        read, written = [], []
        for token, slot, first, end in spans:
            positions = np.arange(first, end)
            read.append(token - first + positions)
            written.append(self._rows(slot, positions))
        return uploaded(np.stack([np.concatenate(read), np.concatenate(written)]), self.table.device)

    def _rows(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """Returns the places of these positions of a slot in the flattened blocks."""
        blocks = self._allocated().rows[slot, positions // self.block_tokens].astype(np.int64)
        rows: np.ndarray = blocks * self.block_tokens + positions % self.block_tokens
        return rows

    def _allocated(self) -> BlockTables:
        """Returns the tables. Allocates the memory first if necessary."""
        if self._tables is None:
            count = self.num_blocks()
            try:
                self._hold(self._keys, count)
                if self.states:
                    self.states.hold(self._max_slots)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"rollout.kv_cache_gb: got {self._budget.given} and {count * self.block_bytes / 1e9:.3g} GB of it "
                    f"are needed, but the device has less free memory when the engine starts. Lower it. ({error})"
                ) from error
            self._tables = BlockTables(
                count,
                self.block_tokens,
                self._max_slots,
                self._max_positions,
                shares_computed=self.states is None,
            )
        return self._tables

    def _hold(self, like: Tensor, num_blocks: int) -> None:
        shape = self.shape
        sizes = (self._num_layers, num_blocks, self.block_tokens, shape.num_kv_heads)
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [((*sizes, shape.head_dim), like.dtype)]
        if not shape.latent:
            kinds.append(((*sizes, shape.value_dim), like.dtype))
        if self._routing_shape is not None:
            routing = self._routing_shape.new_buffer(num_blocks, self.block_tokens, device=torch.device("meta"))
            kinds.append((tuple(routing.shape), routing.dtype))
        zeros = self._zeros if self._zeros and num_blocks else _torch_zeros(like.device)
        self._keys, *rest = zeros(kinds)
        self._values = self._keys[..., : shape.value_dim] if shape.latent else rest.pop(0)
        self.kept = (self._keys,) if shape.latent else (self._keys, self._values)
        self.routing: tuple[Tensor, ...] = tuple(rest)
        self.layers = list(zip(self._keys.unbind(), self._values.unbind(), strict=True))


def _torch_zeros(device: torch.device) -> Zeros:
    return lambda kinds: [torch.zeros(*shape, dtype=dtype, device=device) for shape, dtype in kinds]


def _work(heads: Sequence[Head], entries: Sequence[EnteredSample], first_slot: int) -> Entered:
    """Returns the work for samples with these heads in the slots from `first_slot` on. Equal ones are computed once."""
    whole, parts, alone = dict[Head, list[Keeper]](), dict[Head, Suffix](), list[Suffix]()
    num_parked_tokens, num_prefix_tokens = 0, 0
    for slot, (head, entry) in enumerate(zip(heads, entries, strict=True), start=first_slot):
        keeper, mate = (slot, entry.first), parts.get(head)
        suffix = Suffix(*keeper, head[entry.first :], entry.round)
        if entry.is_parked:
            alone.append(suffix)
            num_parked_tokens += entry.first
        elif not entry.is_computed:
            continue
        elif head in whole:
            whole[head].append(keeper)
        elif mate and mate.first <= entry.first:
            parts[head] = mate._replace(others=(*mate.others, keeper))
        elif entry.follows:
            if mate:  # it lacks what `mate` found
                alone.append(suffix)
            else:
                parts[head] = suffix
            num_prefix_tokens += 0 if entry.is_of_prompt else entry.first
        else:
            whole[head] = [keeper]
    return Entered(whole, [*alone, *parts.values()], num_parked_tokens, num_prefix_tokens)


class _PrefillAttention(PrefillAttention):
    """Prefill attention. `moved` [2, stored tokens] has token indices in the padded heads and their places in the
    blocks."""

    def __init__(self, cache: BlockCache, moved: Tensor, width: int) -> None:
        super().__init__(width, cache.shape)
        self._cache, self._moved = cache, moved

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        _store(self._cache.kept, layer, self._moved, (keys, values))

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        _store(self._cache.routing, layer, self._moved, (experts,))


class _SuffixAttention(SuffixAttention):
    """Suffix attention. `moved` is as in `_PrefillAttention`, and `blocks` [suffixes, blocks] are the blocks to
    read."""

    def __init__(
        self, cache: BlockCache, moved: Tensor, blocks: Tensor, suffixes: Sequence[Suffix], width: int
    ) -> None:
        num_read = blocks.shape[1] * cache.block_tokens
        super().__init__(suffixes, width, cache.shape, num_read, cache.layers[0][0])
        self._cache, self._moved, self._blocks = cache, moved, blocks

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        _store(self._cache.kept, layer, self._moved, (keys, values))

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        _store(self._cache.routing, layer, self._moved, (experts,))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.layers[layer]
        read_keys = self._gathered(keys)
        return read_keys, read_keys[..., : self._shape.value_dim] if self._shape.latent else self._gathered(values)

    def _gathered(self, stored: Tensor) -> Tensor:
        blocks = stored.index_select(0, self._blocks.reshape(-1))
        return blocks.view(len(self._blocks), -1, *stored.shape[2:]).transpose(1, 2)


def _store(buffers: Sequence[Tensor], layer: int, moved: Tensor, new: Sequence[Tensor]) -> None:
    for buffer, tokens in zip(buffers, new, strict=False):  # latents have only one buffer
        stored = tokens.index_select(0, moved[0]).to(buffer.dtype)
        buffer[layer].flatten(0, 1).index_copy_(0, moved[1], stored)
