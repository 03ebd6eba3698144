"""Triton kernels for sampling, the end of a step, and attention over blocks. Import this module only if Triton is
installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrain.models import layer_kernels
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
        x = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32) / temperature
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
    x = tl.load(logits + columns).to(tl.float32) / temperature
    score = tl.where(greedy, x, x + _gumbels(state, columns))
    token = tl.min(tl.where(score == tl.max(score, 0), columns, vocab - 1), 0)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) / temperature - normaliser)


def draw_rows(logits: Tensor, streams: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the result of decoder.draw without truncation."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    layer_kernels.launch(
        _draw, (rows,), logits, streams.contiguous(), positions.contiguous(), tokens, logprobs, temperature or 1.0,
        vocab, logits.stride(0),
        blocks_at_once=_BLOCKS_AT_ONCE, block_tokens=BLOCK_TOKENS, is_greedy=temperature == 0, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


# The end of a step: its tokens go to the results and become the next input, and flags tell which responses end.

_SLOTS_AT_ONCE = 128
_TOKEN: tl.constexpr = tl.constexpr(streams_of.TOKEN)
_POSITION: tl.constexpr = tl.constexpr(streams_of.POSITION)
_DRAWN: tl.constexpr = tl.constexpr(streams_of.DRAWN)
_LIMIT: tl.constexpr = tl.constexpr(streams_of.LIMIT)


@triton.jit
def _finish_step(
    tokens, logprobs, stops, state, increments, stopped, failed, finished, all_tokens, all_logprobs,
    num_slots, state_stride,
    num_stops: tl.constexpr, slots_at_once: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * slots_at_once + tl.arange(0, slots_at_once)
    is_there = slot < num_slots
    token = tl.load(tokens + slot, mask=is_there, other=0)
    logprob = tl.load(logprobs + slot, mask=is_there, other=0.0)
    state += slot
    increment = tl.load(increments + slot, mask=is_there, other=0)
    position = tl.load(state + _POSITION * state_stride, mask=is_there, other=0) + increment
    drawn = tl.load(state + _DRAWN * state_stride, mask=is_there, other=0) + increment
    limit = tl.load(state + _LIMIT * state_stride, mask=is_there, other=0)
    tl.store(all_tokens + slot, token, mask=is_there)
    tl.store(all_logprobs + slot, logprob, mask=is_there)
    tl.store(state + _TOKEN * state_stride, token, mask=is_there)
    tl.store(state + _POSITION * state_stride, position, mask=is_there)
    tl.store(state + _DRAWN * state_stride, drawn, mask=is_there)
    is_stop = slot < 0
    for number in tl.static_range(num_stops):
        is_stop = is_stop | (token == tl.load(stops + number))
    is_wrong = (tl.abs(logprob) < float("inf")) == 0  # NaN too
    tl.store(stopped + slot, is_stop, mask=is_there)
    tl.store(failed + slot, is_wrong, mask=is_there)
    tl.store(finished + slot, is_stop | is_wrong | (drawn >= limit), mask=is_there)


def finish_step(
    tokens: Tensor,
    logprobs: Tensor,
    stops: Tensor,
    state: Tensor,
    increments: Tensor,
    flags: tuple[Tensor, Tensor, Tensor],
    drawn: tuple[Tensor, Tensor],
) -> None:
    """Does the work of Slots.take for a step's `tokens` and `logprobs` [slots], with the slots' part of the state.

    `drawn` are the tokens and log-probs of the results.
    """
    num_slots = len(tokens)
    layer_kernels.launch(
        _finish_step, (triton.cdiv(num_slots, _SLOTS_AT_ONCE),),
        tokens, logprobs, stops, state, increments, *flags, *drawn,
        num_slots, state.stride(0),
        num_stops=len(stops), slots_at_once=_SLOTS_AT_ONCE, num_warps=4,
    )  # fmt: skip


# Attention kernel: one query token per slot over keys and values in blocks.


@triton.jit
def _attend(
    queries, keys, values, table, positions, attended, sinks, scale, softcap,
    slot_stride, head_stride, table_stride, num_kv_heads, group_size, head_dim, window,
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
    seen = tl.maximum(length - window, 0) if window is not None else 0
    for first in range(seen // block_tokens * block_tokens, length, block_tokens):
        block = tl.load(table + slot * table_stride + first // block_tokens).to(tl.int64)
        is_there = (first + place < length) & (first + place >= seen)
        rows = ((block * block_tokens + place) * num_kv_heads + kv_head) * head_dim
        is_read = is_there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        v = tl.load(values + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if softcap is not None:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * scores) + 1.0))  # tanh
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        kept = tl.exp(largest - new_largest)
        total = total * kept + tl.sum(weights, 1)
        result = result * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    if sinks is not None:
        sink = tl.load(sinks + kv_head * group_size + head, mask=head < group_size, other=0.0).to(tl.float32)
        new_largest = tl.maximum(largest, sink)
        kept = tl.exp(largest - new_largest)
        total = total * kept + tl.exp(sink - new_largest)
        result = result * kept[:, None]
    num_heads = num_kv_heads * group_size
    places = (slot * num_heads + heads) * head_dim + dim[None, :]
    tl.store(attended + places, (result / total[:, None]).to(q.dtype), mask=is_query)


def attend_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends to blocks. Returns [slots, heads, head_dim], the shape of `queries`.

    `keys` and `values` are a layer's blocks, `table` has the blocks of each slot, `positions` [slots] the queries'
    positions. Scores are multiplied by `scale`. For `window`, `softcap` and `sinks` see models.attention.attend.
    """
    num_slots, num_heads, head_dim = queries.shape
    _, block_tokens, num_kv_heads, _ = keys.shape
    group_size = num_heads // num_kv_heads
    attended = queries.new_empty(queries.shape)
    layer_kernels.launch(
        _attend, (num_slots, num_kv_heads),
        queries, keys, values, table, positions, attended, sinks, scale, softcap,
        queries.stride(0), queries.stride(1), table.stride(0), num_kv_heads, group_size, head_dim, window,
        group_rows=max(16, triton.next_power_of_2(group_size)),  # the minimum of matrix units
        block_tokens=block_tokens,
        dim_columns=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return attended
