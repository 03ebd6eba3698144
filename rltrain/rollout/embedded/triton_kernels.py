"""Triton kernels for sampling, attention over blocks, and what is around a layer's products. Import this module only
if Triton is installed."""

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
    _draw[rows,](
        logits, streams.contiguous(), positions.contiguous(), tokens, logprobs, temperature or 1.0, vocab,
        logits.stride(0),
        blocks_at_once=_BLOCKS_AT_ONCE, block_tokens=BLOCK_TOKENS, is_greedy=temperature == 0, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


# The end of a step: its tokens go to the transcript and become the next input, and flags tell which responses end.

_SLOTS_AT_ONCE = 128
_TOKEN: tl.constexpr = tl.constexpr(streams_of.TOKEN)
_POSITION: tl.constexpr = tl.constexpr(streams_of.POSITION)
_DRAWN: tl.constexpr = tl.constexpr(streams_of.DRAWN)
_PLACE: tl.constexpr = tl.constexpr(streams_of.PLACE)
_LIMIT: tl.constexpr = tl.constexpr(streams_of.LIMIT)


@triton.jit
def _finish_step(
    tokens, logprobs, stops, state, increments, stopped, failed, finished, all_tokens, all_logprobs,
    num_slots, state_stride, increments_stride,
    num_stops: tl.constexpr, slots_at_once: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * slots_at_once + tl.arange(0, slots_at_once)
    is_there = slot < num_slots
    token = tl.load(tokens + slot, mask=is_there, other=0)
    logprob = tl.load(logprobs + slot, mask=is_there, other=0.0)
    state += slot
    increments += slot
    position = tl.load(state + _POSITION * state_stride, mask=is_there, other=0)
    drawn = tl.load(state + _DRAWN * state_stride, mask=is_there, other=0)
    place = tl.load(state + _PLACE * state_stride, mask=is_there, other=0)
    limit = tl.load(state + _LIMIT * state_stride, mask=is_there, other=0)
    tl.store(all_tokens + place, token, mask=is_there)
    tl.store(all_logprobs + place, logprob, mask=is_there)
    drawn += tl.load(increments + increments_stride, mask=is_there, other=0)
    position += tl.load(increments, mask=is_there, other=0)
    place += tl.load(increments + 2 * increments_stride, mask=is_there, other=0)
    tl.store(state + _TOKEN * state_stride, token, mask=is_there)
    tl.store(state + _POSITION * state_stride, position, mask=is_there)
    tl.store(state + _DRAWN * state_stride, drawn, mask=is_there)
    tl.store(state + _PLACE * state_stride, place, mask=is_there)
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
    transcript: tuple[Tensor, Tensor],
) -> None:
    """Does the work of Slots.take for a step's `tokens` and `logprobs` [slots], with the slots' part of the state."""
    num_slots = len(tokens)
    _finish_step[triton.cdiv(num_slots, _SLOTS_AT_ONCE),](
        tokens, logprobs, stops, state, increments, *flags, *transcript,
        num_slots, state.stride(0), increments.stride(0),
        num_stops=len(stops), slots_at_once=_SLOTS_AT_ONCE, num_warps=4,
    )  # fmt: skip


# Attention kernel: one query token per slot over keys and values in blocks.


@triton.jit
def _attend(
    queries, keys, values, table, positions, attended, sinks, scale, softcap,
    slot_stride, head_stride, table_stride, num_kv_heads, group_size, head_dim, window,
    group_rows: tl.constexpr, block_tokens: tl.constexpr, dim_columns: tl.constexpr,
    has_window: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
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
    seen = tl.maximum(length - window, 0) if has_window else 0
    for first in range(seen // block_tokens * block_tokens, length, block_tokens):
        block = tl.load(table + slot * table_stride + first // block_tokens).to(tl.int64)
        is_there = (first + place < length) & (first + place >= seen)
        rows = ((block * block_tokens + place) * num_kv_heads + kv_head) * head_dim
        is_read = is_there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        v = tl.load(values + rows[:, None] + dim[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if has_softcap:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * scores) + 1.0))  # tanh
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        kept = tl.exp(largest - new_largest)
        total = total * kept + tl.sum(weights, 1)
        result = result * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    if has_sinks:
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
    _attend[num_slots, num_kv_heads](
        queries, keys, values, table, positions, attended, _or(sinks, queries), scale, softcap or 1.0,
        queries.stride(0), queries.stride(1), table.stride(0), num_kv_heads, group_size, head_dim, window or 0,
        group_rows=max(16, triton.next_power_of_2(group_size)),  # the minimum of matrix units
        block_tokens=block_tokens,
        dim_columns=max(16, triton.next_power_of_2(head_dim)),
        has_window=window is not None,
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return attended


# Kernels of layers: residual and norm, norms and rotation of heads, gates. Each rounds where the functions of layers.py
# do, so results differ only by the order of sums.


@triton.jit
def _norm_of(x, is_there, weight, bias, place, width, eps, offset, centers: tl.constexpr, has_bias: tl.constexpr):
    """Returns a row's RMS norm, or its layer norm if it `centers`, as fp32."""
    if centers:
        x = tl.where(is_there, x - tl.sum(x, 0) / width, 0.0)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    x *= tl.load(weight + place, mask=is_there, other=0.0).to(tl.float32) + offset
    if has_bias:
        x += tl.load(bias + place, mask=is_there, other=0.0).to(tl.float32)
    return x


@triton.jit
def _add_norm(
    hidden, made, made_bias, post_weight, weight, bias, normed, width, eps, offset,
    hidden_stride, made_stride,
    columns: tl.constexpr, adds: tl.constexpr, adds_bias: tl.constexpr, has_post: tl.constexpr, norms: tl.constexpr,
    centers: tl.constexpr,
):  # fmt: skip
    """Handles one row per program: hidden += norm(made + made_bias), then normed = norm(hidden)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, columns)
    is_there = place < width
    places = hidden + row * hidden_stride + place
    x = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    if adds:
        y = tl.load(made + row * made_stride + place, mask=is_there, other=0.0).to(tl.float32)
        if adds_bias:
            y += tl.load(made_bias + place, mask=is_there, other=0.0).to(tl.float32)
        if has_post:
            y = _norm_of(y, is_there, post_weight, post_weight, place, width, eps, offset, False, False)
            y = y.to(post_weight.dtype.element_ty).to(tl.float32)
        rounded = (x + y).to(hidden.dtype.element_ty)
        tl.store(places, rounded, mask=is_there)
        x = rounded.to(tl.float32)
    if norms:
        x = _norm_of(x, is_there, weight, bias, place, width, eps, offset, centers, centers)
        tl.store(normed + row * width + place, x.to(normed.dtype.element_ty), mask=is_there)


def add_norm(
    hidden: Tensor,
    made: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    bias: Tensor | None = None,
    made_bias: Tensor | None = None,
    post_weight: Tensor | None = None,
) -> Tensor | None:
    """Adds `made` to `hidden`, both [tokens, hidden], in place and returns the norm of the sum.

    `made_bias` is added to `made` first, and then comes its norm with `post_weight`. Without `made` nothing is added,
    without `weight` nothing is returned. With `bias` the returned norm is a layer norm.
    """
    tokens, width = hidden.shape
    normed = None if weight is None else torch.empty(tokens, width, dtype=weight.dtype, device=hidden.device)
    columns = triton.next_power_of_2(width)
    _add_norm[tokens,](
        hidden, hidden if made is None else made, _or(made_bias, hidden), _or(post_weight, hidden),
        _or(weight, hidden), _or(bias, hidden), _or(normed, hidden), width, eps, offset,
        hidden.stride(0), 0 if made is None else made.stride(0),
        columns=columns, adds=made is not None, adds_bias=made_bias is not None, has_post=post_weight is not None,
        norms=weight is not None, centers=bias is not None, num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    return normed


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Returns the tensor, or another one for a pointer that the kernel does not use."""
    return unused if tensor is None else tensor


_HEADS_AT_ONCE = 4


@triton.jit
def _rotate_heads(
    fused, cos, signed_sin, query_weight, key_weight, queries, keys, values, rows,
    num_heads, num_kv_heads, head_dim, size, eps, offset,
    fused_stride, query_stride, rotation_stride, rows_step, row_stride, head_stride,
    heads_at_once: tl.constexpr, dim_columns: tl.constexpr, has_norms: tl.constexpr, pairs: tl.constexpr,
    by_rows: tl.constexpr,
):  # fmt: skip
    """Handles some heads of one token per program: queries, then keys, and then values unless rows count tokens.

    A head's elements are loaded twice, in their order and with the halves of its rotated part swapped.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once))[:, None]
    dim = tl.arange(0, dim_columns)[None, :]
    is_query = head < num_heads
    key_head = head - num_heads
    is_key = (key_head >= 0) & (key_head < num_kv_heads)
    value_head = key_head - num_kv_heads
    is_value = (value_head >= 0) & (value_head < num_kv_heads) & by_rows
    half = size // 2
    if pairs:
        turned_from = tl.where(dim < half, 2 * dim, tl.where(dim < size, 2 * (dim - half) + 1, dim))
        own = tl.where(is_value, dim, turned_from)
        other = tl.where(dim < half, 2 * dim + 1, 2 * (dim - half))
    else:
        own, other = dim, tl.where(dim < half, dim + half, dim - half)
    begin = tl.where(is_query, head * query_stride, num_heads * query_stride + key_head * head_dim)
    is_there = (dim < head_dim) & (is_query | is_key | is_value)
    turns = (dim < size) & (is_query | is_key)
    source = fused + token * fused_stride + begin
    raw = tl.load(source + own, mask=is_there, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
    if has_norms:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / head_dim + eps)[:, None]
        of_query, of_key = is_query & (dim < head_dim), is_key & (dim < head_dim)
        gain = tl.load(query_weight + own, mask=of_query, other=0.0).to(tl.float32)
        gain += tl.load(key_weight + own, mask=of_key, other=0.0).to(tl.float32) + offset
        other_gain = tl.load(query_weight + other, mask=of_query & turns, other=0.0).to(tl.float32)
        other_gain += tl.load(key_weight + other, mask=of_key & turns, other=0.0).to(tl.float32) + offset
        x = (x * scale * gain).to(fused.dtype.element_ty).to(tl.float32)
        y = (y * scale * other_gain).to(fused.dtype.element_ty).to(tl.float32)
    angle = token * rotation_stride + dim
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(signed_sin + angle, mask=turns, other=0.0)
    turned = tl.where(is_value, raw, (x * c + y * s).to(fused.dtype.element_ty))
    tl.store(queries + (token * num_heads + head) * head_dim + dim, turned, mask=is_there & is_query)
    if by_rows:
        row = tl.load(rows + token * rows_step) * row_stride
        tl.store(values + row + value_head * head_stride + dim, turned, mask=is_there & is_value)
    else:
        row = token * row_stride
    tl.store(keys + row + key_head * head_stride + dim, turned, mask=is_there & is_key)


def rotate_heads(
    fused: Tensor,
    rotation: tuple[Tensor, Tensor],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    pairs: bool = False,
    gated: bool = False,
    written: tuple[Tensor, Tensor, Tensor, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns (queries [tokens, heads, head_dim], keys [tokens, kv_heads, head_dim]), rotated.

    `fused` [tokens, columns] has queries, keys and values. With `gated` each query is followed by its gate. `norms` are
    weights for queries and keys. With `pairs` neighbours rotate with each other; their first elements come first in the
    result. With `written`, a `Written` of a cache, keys and values are stored there and keys are None.
    """
    tokens = len(fused)
    cos, signed_sin = rotation
    queries = fused.new_empty(tokens, num_heads, head_dim)
    made = None
    if written is None:
        made = fused.new_empty(tokens, num_kv_heads, head_dim)
        keys, values, rows, row_stride, head_stride = made, made, cos, num_kv_heads * head_dim, head_dim
    else:
        keys, values, rows, row_stride, head_stride = written
    query_weight, key_weight = norms or (fused, fused)
    num_rows = num_heads + num_kv_heads * (1 if written is None else 2)
    _rotate_heads[tokens, triton.cdiv(num_rows, _HEADS_AT_ONCE)](
        fused, cos, signed_sin, query_weight, key_weight, queries, keys, values, rows,
        num_heads, num_kv_heads, head_dim, cos.shape[-1], eps, offset,
        fused.stride(0), head_dim * (2 if gated else 1), cos.stride(0), rows.stride(0), row_stride, head_stride,
        heads_at_once=_HEADS_AT_ONCE, dim_columns=triton.next_power_of_2(head_dim), has_norms=norms is not None,
        pairs=pairs, by_rows=written is not None, num_warps=2,
    )  # fmt: skip
    return queries, made


_SILU: tl.constexpr = tl.constexpr(0)
_GELU: tl.constexpr = tl.constexpr(1)
_SIGMOID: tl.constexpr = tl.constexpr(2)
_KINDS = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2}
"""Activations of `gate_rows`, as layers.GATE_KERNELS has them."""


@triton.jit
def _gate_rows(
    gates, ups, weights, made, width, gate_width, gate_stride, gate_group_stride, up_stride,
    kind: tl.constexpr, has_weights: tl.constexpr, rounds: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Handles some columns of one row per program: made = activation(gate) * up * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = column < width
    place = row * gate_stride + column // gate_width * gate_group_stride + column % gate_width
    x = tl.load(gates + place, mask=is_there, other=0.0).to(tl.float32)
    # tanh(z) = 2 * sigmoid(2 z) - 1, and the factor is 2 * sqrt(2 / pi)
    wide = 1.5957691216057308 * (x + 0.044715 * x * x * x) if kind == _GELU else x
    share = 1.0 / (1.0 + tl.exp(-wide))
    x = share if kind == _SIGMOID else x * share
    if rounds:
        x = x.to(made.dtype.element_ty).to(tl.float32)
    x *= tl.load(ups + row * up_stride + column, mask=is_there, other=0.0).to(tl.float32)
    if has_weights:
        x = x.to(made.dtype.element_ty).to(tl.float32) * tl.load(weights + row)
    tl.store(made + row * width + column, x.to(made.dtype.element_ty), mask=is_there)


def gate_rows(gates: Tensor, ups: Tensor, activation: str, weights: Tensor | None = None) -> Tensor:
    """Returns activation(gates) * ups * weights, shape [rows, columns] of `ups`.

    `gates` has as many elements in each row, of shape [rows, columns] or [rows, groups, columns of a group]. `weights`
    [rows, 1] are fp32. Sigmoids are not rounded before the product, other activations are.
    """
    rows, width = ups.shape
    made = ups.new_empty(rows, width)
    columns = min(1024, triton.next_power_of_2(width))
    _gate_rows[rows, triton.cdiv(width, columns)](
        gates, ups, _or(weights, ups), made, width, gates.shape[-1], gates.stride(0), gates.stride(-2), ups.stride(0),
        kind=_KINDS[activation], has_weights=weights is not None, rounds=activation != "sigmoid", columns=columns,
        num_warps=min(4, max(1, columns // 128)),
    )  # fmt: skip
    return made
