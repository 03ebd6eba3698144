"""Tests of attention over blocks: gathering against plain attention, and a stand-in for the kernels of GPUs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded import block_cache, engine
from rltrain.rollout.embedded.block_cache import (
    BlockAttention,
    GatheredBlocks,
    KernelBlocks,
    VarlenBlocks,
    choose_attention,
    difference,
)
from rltrain.rollout.embedded.kv_cache import AttentionShape
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from tests.support.cuda_graphs import Recorder
from tests.support.rollout_models import load_engine, ragged_requests, write_checkpoint

varlen = pytest.importorskip("torch.nn.attention.varlen")


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """Computes torch's attention for one query per sequence. Refuses the inputs refused by FlashAttention 2, except for
    dtypes."""
    num_blocks, block_tokens, num_kv_heads, _ = key.shape
    count = len(query)
    for integers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert integers.dtype == torch.int32 and integers.stride(-1) == 1
    assert block_tokens % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert num_splits == 1 and max_q == 1
    assert cu_seq_q.shape == cu_seq_k.shape == (count + 1,) and seqused_k.shape == (count,)
    assert block_table.shape == (count, max_k // block_tokens) and key.shape == value.shape
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert enable_gqa == (query.shape[1] != num_kv_heads)
    return attended(query.index_select(0, cu_seq_q[:-1]), key, value, block_table, seqused_k, scale)


def attended(queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Returns the attention of one query per sequence over the first `lengths` tokens of its blocks."""
    count, num_kv_heads, rows = len(queries), keys.shape[2], table.flatten()
    k, v = (stored.index_select(0, rows).view(count, -1, *stored.shape[2:]) for stored in (keys, values))
    bias = torch.zeros(()).masked_fill(torch.arange(k.shape[1]) >= lengths[:, None], -torch.inf)[:, None, None]
    q = queries.reshape(count, num_kv_heads, -1, queries.shape[-1])
    found = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), bias, scale=scale)
    return found.reshape(queries.shape)


def attend_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes the result of the Triton kernel for plain scores and accepts only the kernel's strides."""
    assert window is softcap is sinks is None
    num_slots, block_tokens = len(queries), keys.shape[1]
    assert keys.is_contiguous() and values.is_contiguous() and queries.stride(2) == 1
    assert table.dtype == torch.int32 and table.stride(1) == 1 and positions.stride(0) == 1
    assert block_tokens.bit_count() == 1 and positions.shape == (num_slots,) and len(table) == num_slots
    return attended(queries, keys, values, table, positions + 1, scale)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs stand-ins for the GPU kernels."""
    monkeypatch.setattr(varlen, "varlen_attn", flash_attention)
    kernel = ModuleType("block_kernel")
    kernel.attend_blocks = attend_blocks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rltrain.rollout.embedded.triton_kernels", kernel)


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    """Returns a shape with an unusual scale of the scores."""
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim, 0.7)


GROUPED = shape_of(8, 2, 16)


class FewBlocks:
    """Three slots of up to two blocks of four tokens. All blocks outside the slots are NaN, except block 0."""

    block_tokens, capacity = 4, 8

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.shape, self.routing = shape_of(4, num_kv_heads, head_dim), ()
        generator = torch.Generator().manual_seed(0)
        keys, values = torch.randn(2, 7, 4, num_kv_heads, head_dim, generator=generator)
        self.layers = [(keys, values)]
        self.table = torch.tensor([[3, 0], [1, 6], [4, 2]], dtype=torch.int32)
        self.offsets = torch.arange(9, dtype=torch.int32)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_gathered_blocks_attend_as_plain_attention_does(num_kv_heads: int) -> None:
    blocks = FewBlocks(num_kv_heads, 8)
    keys, values = (tensor.clone() for tensor in blocks.layers[0])
    positions = torch.tensor([2, 5, 7])
    q, k, v = (torch.randn(3, heads, 8) for heads in (4, num_kv_heads, num_kv_heads))
    found = GatheredBlocks(blocks, positions, 8)(0, q, k, v)
    for slot, position in enumerate(positions.tolist()):
        rows = blocks.table[slot].long()
        own_keys, own_values = (
            torch.cat([stored[rows].flatten(0, 1)[:position], new[slot : slot + 1]])
            for stored, new in ((keys, k), (values, v))
        )
        expected = F.scaled_dot_product_attention(
            q[slot, :, None], own_keys.transpose(0, 1), own_values.transpose(0, 1), enable_gqa=True, scale=0.7
        )
        torch.testing.assert_close(found[slot], expected.flatten())
        assert torch.equal(blocks.layers[0][0][rows[position // 4], position % 4], k[slot])
    changed = (blocks.layers[0][0] != keys).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [2, 3, 6], "only the blocks of the new tokens change"


@pytest.mark.parametrize("kind", [VarlenBlocks, KernelBlocks])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2)])
def test_what_gpus_have_is_asked_for_what_gathering_gives(
    on_gpu: None, kind: type[BlockAttention], num_heads: int, num_kv_heads: int
) -> None:
    assert difference(kind, shape_of(num_heads, num_kv_heads, 16), torch.zeros(())) < 1e-5


class OnGpu:
    """A stand-in for a CUDA tensor in `choose_attention`."""

    is_cuda = True


def chosen(
    monkeypatch: pytest.MonkeyPatch, attention: Callable[..., Any] | None = None, shape: AttentionShape = GROUPED
) -> tuple[type, str]:
    if attention:
        monkeypatch.setattr(varlen, "varlen_attn", attention)
    tried = block_cache.difference
    monkeypatch.setattr(block_cache, "difference", lambda *args: tried(*args[:-1], torch.zeros(())))
    return choose_attention(shape, OnGpu())  # type: ignore[arg-type]


def test_flash_attention_is_chosen_where_it_works(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch) == (VarlenBlocks, VarlenBlocks.name)


def test_latents_are_gathered(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = AttentionShape(8, 1, 24, 16, 0.7, latent=True)
    assert chosen(monkeypatch, shape=latents) == (GatheredBlocks, GatheredBlocks.name)


def test_where_this_torch_has_no_block_tables_the_kernel_is_chosen(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, words = chosen(monkeypatch, lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: query)
    assert kind is KernelBlocks and "flash attention (torch.nn.attention.varlen): TypeError" in words


def test_what_refuses_or_errs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # not installed

    def refusing(*args: Any, **rest: Any) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    def wrong(
        query: Tensor, *args: Any, seqused_k: Tensor, block_table: Tensor, num_splits: int, **rest: Any
    ) -> Tensor:
        return torch.full_like(query, torch.nan)

    kind, words = chosen(monkeypatch, refusing)
    assert kind is GatheredBlocks and "Ampere" in words and "import of triton" in words
    kind, words = chosen(monkeypatch, wrong)
    assert kind is GatheredBlocks and "off by" in words


@pytest.mark.parametrize("kind", [VarlenBlocks, KernelBlocks])
def test_steps_over_blocks_are_recorded_once_for_all_lengths(
    on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BlockAttention]
) -> None:
    monkeypatch.setattr(engine, "choose_attention", lambda *args: (kind, ""))
    path, record = write_checkpoint(tmp_path, "qwen3", max_position_embeddings=600), Recorder()
    sampling = SamplingParams(1.0, 1.0, 0, 40, ())
    samples = [*ragged_requests(3), Sample(9, ragged_requests(126)[125].prompt, seed=9)]
    assert len(samples[-1].prompt) < 256 < len(samples[-1].prompt) + 40, "the sample reaches its second block"
    expected = load_engine(path, max_context_tokens=600)[0].generate(samples, sampling)
    over_blocks, _ = load_engine(path, max_context_tokens=600, kv_tokens=2048, record=record)
    for done, other in zip(over_blocks.generate(samples, sampling), expected, strict=True):
        assert done.tokens == other.tokens
        assert done.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert record.num_recorded == 1
