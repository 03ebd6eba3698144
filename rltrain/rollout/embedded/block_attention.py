"""Attention of decode steps over keys and values that lie in blocks."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rltrain.models.attention import attend
from rltrain.rollout.embedded.kv_cache import AttentionShape, rounded, unseen_bias, window_biases
from rltrain.rollout.embedded.sample_states import StepStates

_RECORDED_SIZES = 4
"""Of numbers of blocks read, from each power of two up to the next."""


class Blocks(Protocol):
    """What attention reads and writes; all of it stays where it is from step to step."""

    shape: AttentionShape
    block_tokens: int
    capacity: int
    """Positions of the longest sample, in whole blocks."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer [blocks, block_tokens, kv_heads, head_dim or value_dim]; with latent attention
    values are views of keys."""
    routing: tuple[Tensor, ...]
    """Experts [layers, blocks, block_tokens, top_k], where they are kept."""
    table: Tensor
    """[slots, capacity / block_tokens] int32: the blocks of each slot."""
    offsets: Tensor
    """[max(slots, capacity) + 1] int32: 0, 1, 2, ..."""


class BlockAttention:
    """Stores one new token in each of the first `len(positions)` slots, where it stands. Subclasses attend."""

    name: str
    block_tokens: int
    reads_cache = True
    states: StepStates | None = None

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        size = blocks.block_tokens
        holding = blocks.table[: len(positions)].gather(1, (positions // size)[:, None])[:, 0]
        self._written = holding * size + positions % size
        self._layers, self._shape, self._routing = blocks.layers, blocks.shape, blocks.routing

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        """As KvCache says."""
        raise NotImplementedError

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        stored_keys, stored_values = self._layers[layer]
        stored_keys.flatten(0, 1).index_copy_(0, self._written, keys)
        if not self._shape.latent:
            stored_values.flatten(0, 1).index_copy_(0, self._written, values)
        return self._attend(stored_keys, stored_values, queries, self._shape.window(layer), sinks)

    def keep_routing(self, layer: int, experts: Tensor) -> None:
        """As DecodeAttention says."""
        (buffer,) = self._routing
        buffer[layer].flatten(0, 1).index_copy_(0, self._written, experts.to(buffer.dtype))

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """[tokens, heads * value_dim] from a layer's blocks and queries [tokens, heads, head_dim]."""
        raise NotImplementedError


class GatheredBlocks(BlockAttention):
    """Copies each slot's blocks, up to the longest, into rows of their own first: on every device, in every dtype."""

    name = "blocks that are gathered first"
    block_tokens = 32
    """A sample wastes half a block; a copy moves whole ones, which should be no shorter than a few lines of memory."""

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
        q = queries.reshape(num_slots, num_kv_heads, -1, queries.shape[-1])  # the heads that share a KV head are rows
        shape = self._shape
        of_rows = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        attended = attend(q, k, v, self._bias_of[window], scale=shape.scale, softcap=shape.softcap, sinks=of_rows)
        return attended.reshape(num_slots, -1)

    def _gathered(self, stored: Tensor, num_slots: int) -> Tensor:
        """[slots, kv_heads, positions, elements]"""
        return stored.index_select(0, self._read).view(num_slots, -1, *stored.shape[2:]).transpose(1, 2)


class VarlenBlocks(BlockAttention):
    """torch's flash attention over sequences of various lengths, which follows block tables and reads no more."""

    name = "blocks, by flash attention (torch.nn.attention.varlen)"
    block_tokens = 256
    """FlashAttention 2 takes multiples of this alone."""

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        super().__init__(blocks, positions, num_positions)
        from torch.nn.attention.varlen import varlen_attn  # not in every torch

        num_slots = len(positions)
        self._attention: Callable[..., Any] = varlen_attn
        self._table = blocks.table[:num_slots]
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
            num_splits=1,  # other numbers of splits leave rows out where keys lie in blocks (pytorch#194167)
        )
        return attended.reshape(len(queries), -1)


class KernelBlocks(BlockAttention):
    """rltrain's own kernel, for any torch that comes with Triton and for float32 too; it reads no more either."""

    name = "blocks, by a Triton kernel of rltrain's own"
    block_tokens = 64
    """What a program of the kernel holds at a time."""

    def __init__(self, blocks: Blocks, positions: Tensor, num_positions: int) -> None:
        super().__init__(blocks, positions, num_positions)
        from rltrain.rollout.embedded.block_kernel import attend_blocks  # not without Triton

        self._attention: Callable[..., Tensor] = attend_blocks
        self._table, self._positions = blocks.table[: len(positions)], positions

    @staticmethod
    def recorded_length(blocks: Blocks, num_positions: int) -> int:
        return blocks.capacity

    def _attend(
        self, keys: Tensor, values: Tensor, queries: Tensor, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        scale = self._shape.scale
        return self._attention(queries, keys, values, self._table, self._positions, scale).view(len(queries), -1)


class _Sample:
    """Blocks of a few short sequences, to try an attention on."""

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
        self.layers = [(keys, values)]
        self.table = torch.tensor([[3, 5], [1, 6], [4, 2]], dtype=torch.int32, device=like.device)
        self.offsets = torch.arange(self.capacity + 1, dtype=torch.int32, device=like.device)


@torch.inference_mode()
def difference(kind: type[BlockAttention], shape: AttentionShape, like: Tensor) -> float:
    """The largest one between what `kind` and GatheredBlocks give for random numbers of the dtype and device of `like`.
    Raises whatever `kind` does."""
    positions = torch.tensor([0, kind.block_tokens, 2 * kind.block_tokens - 7], device=like.device)
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(3, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator).to(like)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    found, expected = (
        attention(_Sample(kind, shape, like), positions, 2 * kind.block_tokens)(0, q, k, v)
        for attention in (kind, GatheredBlocks)
    )
    return float((found.float() - expected.float()).abs().max().nan_to_num(torch.inf))


def choose_attention(shape: AttentionShape, like: Tensor) -> tuple[type[BlockAttention], str]:
    """(the fastest kind that works here, what to say of it): on CUDA it depends on torch, the GPU and the dtype, those
    of `like`, and is tried. Latents are gathered, and where there are windows, bent scores or sinks everything: neither
    kernel has them."""
    reasons: list[str] = []
    takes_scores = shape.softcap is not None or shape.sinks
    by_kernel = like.is_cuda and not shape.latent and shape.windows is None and not takes_scores
    for kind in (VarlenBlocks, KernelBlocks) if by_kernel else ():
        reason = _why_not(kind, shape, like)
        if not reason:
            return kind, "; not ".join([kind.name, *reasons])
        reasons.append(f"{kind.name}: {reason}")
    return GatheredBlocks, "; not ".join([GatheredBlocks.name, *reasons])


def _why_not(kind: type[BlockAttention], shape: AttentionShape, like: Tensor) -> str:
    """Empty where `kind` works."""
    try:
        error = difference(kind, shape, like)
    except Exception as refusal:  # whatever a version, a GPU, a compiler or a driver has against it
        return f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return "" if error < 0.05 else f"it is off by {error:.3g}"
