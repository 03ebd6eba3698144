"""A Triton kernel: attention of one query token per slot over keys and values in blocks. Imports Triton."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(
    queries, keys, values, table, positions, attended, scale,
    slot_stride, head_stride, table_stride, num_kv_heads, group_size, head_dim,
    group_rows: tl.constexpr, block_tokens: tl.constexpr, dim_columns: tl.constexpr,
):  # fmt: skip
    """A program per slot and KV head, with the softmax kept up from block to block (arXiv:1805.02867)."""
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
    """[slots, heads, head_dim] from queries of that shape, a layer's blocks, their table, where queries stand, and what
    scores are multiplied by."""
    num_slots, num_heads, head_dim = queries.shape
    _, block_tokens, num_kv_heads, _ = keys.shape
    group_size = num_heads // num_kv_heads
    attended = queries.new_empty(queries.shape)
    _attend[num_slots, num_kv_heads](
        queries, keys, values, table, positions, attended, scale,
        queries.stride(0), queries.stride(1), table.stride(0), num_kv_heads, group_size, head_dim,
        group_rows=max(16, triton.next_power_of_2(group_size)),  # the least that matrix units take
        block_tokens=block_tokens,
        dim_columns=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return attended
