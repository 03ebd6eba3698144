"""Triton kernels for sampling and for attention over blocks. Import this module only if Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrain.rollout.embedded import decoder as streams_of
from rltrain.rollout.embedded.decoder import BLOCK_TOKENS, FIRST_BLOCK

# Sampling kernel: one token per row of logits, equal to decoder.draw.

_BLOCKS_AT_ONCE = 32
_POSITION_STEP: tl.constexpr = tl.constexpr(streams_of.POSITION_STEP % 2**64)
_COUNTER_STEP: tl.constexpr = tl.constexpr(streams_of.COUNTER_STEP % 2**64)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(streams_of.MULTIPLIER_1 % 2**64)
_MULTIPLIER_2: tl.constexpr = tl.constexpr(streams_of.MULTIPLIER_2 % 2**64)
_UNIFORM_BITS: tl.constexpr = tl.constexpr(streams_of.UNIFORM_BITS % 2**64)
_UNIFORM_SCALE: tl.constexpr = tl.constexpr(streams_of.UNIFORM_SCALE)
_NO_STREAM: tl.constexpr = tl.constexpr(streams_of.NO_STREAM)
_FIRST_BLOCK: tl.constexpr = tl.constexpr(FIRST_BLOCK)
_LOWEST: tl.constexpr = tl.constexpr(-3e38)
"""Replaces minus infinity, because the difference of two infinities is NaN."""


@triton.jit
def _gumbels(state, counters):
    """Returns -log(-log_uniforms), with decoder.log_uniforms."""
    z = state + counters.to(tl.uint64) * _COUNTER_STEP
    z = (z ^ (z >> 30)) * _MULTIPLIER_1
    z = (z ^ (z >> 27)) * _MULTIPLIER_2
    u = (z | _UNIFORM_BITS).to(tl.int64, bitcast=True).to(tl.float32) * -_UNIFORM_SCALE
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5 + u * (1.0 / 6))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))  # 1 - u loses a small u


@triton.jit
def _draw(
    logits, streams, positions, tokens, logprobs, temperature, vocab, row_stride,
    blocks_at_once: tl.constexpr, block_tokens: tl.constexpr, is_greedy: tl.constexpr,
):  # fmt: skip
    """Samples a row per program. It finds the best block while it sums the blocks, then the best token of that
    block."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    stream = tl.load(streams + row)
    greedy = is_greedy | (stream == _NO_STREAM)
    state = stream.to(tl.uint64) + tl.load(positions + row).to(tl.uint64) * _POSITION_STEP
    lane, place = tl.arange(0, blocks_at_once), tl.arange(0, block_tokens)
    largest = tl.full([blocks_at_once], _LOWEST, tl.float32)
    total = tl.zeros([blocks_at_once], tl.float32)
    best = tl.full([blocks_at_once], float("-inf"), tl.float32)
    best_block = tl.zeros([blocks_at_once], tl.int64)
    for first in range(0, tl.cdiv(vocab, block_tokens), blocks_at_once):
        blocks = (first + lane).to(tl.int64)
        columns = blocks[:, None] * block_tokens + place[None, :]
        x = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")) / temperature
        most = tl.max(x, 1)
        floor = tl.maximum(most, _LOWEST)
        part = tl.sum(tl.exp(x - floor[:, None]), 1)
        score = tl.where(greedy, most, floor + tl.log(part) + _gumbels(state, blocks + _FIRST_BLOCK))
        best_block = tl.where(score > best, blocks, best_block)
        best = tl.where(score > best, score, best)
        new_largest = tl.maximum(largest, floor)
        total = total * tl.exp(largest - new_largest) + part * tl.exp(floor - new_largest)
        largest = new_largest
    peak = tl.max(largest, 0)
    normaliser = peak + tl.log(tl.sum(total * tl.exp(largest - peak), 0))
    chosen = tl.min(tl.where(best == tl.max(best, 0), best_block, vocab // block_tokens), 0)
    columns = tl.minimum(chosen * block_tokens + place, vocab - 1)
    x = tl.load(logits + columns) / temperature
    score = tl.where(greedy, x, x + _gumbels(state, columns))
    token = tl.min(tl.where(score == tl.max(score, 0), columns, vocab - 1), 0)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, tl.load(logits + token) / temperature - normaliser)


def draw_rows(logits: Tensor, streams: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the result of decoder.draw without truncation."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw[rows,](
        logits, streams.contiguous(), positions.contiguous(), tokens, logprobs, temperature or 1.0, vocab,
        logits.stride(0),
        blocks_at_once=_BLOCKS_AT_ONCE, block_tokens=BLOCK_TOKENS, is_greedy=temperature == 0, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


# Attention kernel: one query token per slot over keys and values in blocks.


@triton.jit
def _attend(
    queries, keys, values, table, positions, attended, scale,
    slot_stride, head_stride, table_stride, num_kv_heads, group_size, head_dim,
    group_rows: tl.constexpr, block_tokens: tl.constexpr, dim_columns: tl.constexpr,
):  # fmt: skip
    """Attends for one slot and KV head per program, with an online softmax over blocks (arXiv:1805.02867)."""
    slot, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions + slot) + 1
    head, dim, place = tl.arange(0, group_rows), tl.arange(0, dim_columns), tl.arange(0, block_tokens)
    is_query = (head < group_size)[:, None] & (dim < head_dim)[None, :]
    heads = (kv_head * group_size + head)[:, None]
    q = tl.load(queries + slot * slot_stride + heads * head_stride + dim[None, :], mask=is_query, other=0.0)
    largest = tl.full([group_rows], float("-inf"), tl.float32)
    total = tl.zeros([group_rows], tl.float32)
    result = tl.zeros([group_rows, dim_columns], tl.float32)
    for first in range(0, length, block_tokens):
        block = tl.load(table + slot * table_stride + first // block_tokens).to(tl.int64)
        is_there = first + place < length
        rows = ((block * block_tokens + place) * num_kv_heads + kv_head) * head_dim
        is_read = is_there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        v = tl.load(values + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        kept = tl.exp(largest - new_largest)
        total = total * kept + tl.sum(weights, 1)
        result = result * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    num_heads = num_kv_heads * group_size
    places = (slot * num_heads + heads) * head_dim + dim[None, :]
    tl.store(attended + places, (result / total[:, None]).to(q.dtype), mask=is_query)


def attend_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attends to blocks. Returns [slots, heads, head_dim], the shape of `queries`.

    `keys` and `values` are a layer's blocks, `table` has the blocks of each slot, `positions` [slots] the queries'
    positions. Scores are multiplied by `scale`.
    """
    num_slots, num_heads, head_dim = queries.shape
    _, block_tokens, num_kv_heads, _ = keys.shape
    group_size = num_heads // num_kv_heads
    attended = queries.new_empty(queries.shape)
    _attend[num_slots, num_kv_heads](
        queries, keys, values, table, positions, attended, scale,
        queries.stride(0), queries.stride(1), table.stride(0), num_kv_heads, group_size, head_dim,
        group_rows=max(16, triton.next_power_of_2(group_size)),  # the minimum of matrix units
        block_tokens=block_tokens,
        dim_columns=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return attended
