"""Triton kernels of a layer's formulas, for training and engines: norms of sums, head norms with rotation, gates.

Import this module only if Triton is installed. Arithmetic is fp32, and every result is rounded once. So training by
`fused`, which adds gradients, and the embedded engine round alike.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrain.models.attention import Turn

ROWS = 16
"""Heads that a program of training rotates at a time."""
COLUMNS = 1024
"""Elements that a program of a gated activation takes: of one row, or of several short ones."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel. All launches of Triton kernels pass here, so that benchmarks can count them."""
    kernel[grid](*arguments, **constants)


@triton.jit
def read(pointers, mask):
    """Returns elements as fp32, zeros where the mask is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def write(pointers, values, mask):
    """Rounds values and stores them."""
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


# RMS norms of rows, with an addition before: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".


@triton.jit
def inverse_rms(squares, size, eps):
    """Returns 1 / sqrt(mean square + eps) from sums of squares."""
    return 1 / tl.sqrt(squares / size + eps)


@triton.jit
def _normed(x, mask, weight, bias, column, size, eps, offset):
    """Returns the RMS norms of rows [rows, columns], or with a bias their layer norms, as fp32."""
    if bias is not None:
        x = tl.where(mask, x - (tl.sum(x, 1) / size)[:, None], 0.0)
    x *= inverse_rms(tl.sum(x * x, 1), size, eps)[:, None]
    x *= read(weight + column, column < size) + offset
    if bias is not None:
        x += read(bias + column, column < size)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _norm_forward(
    x, added, added_bias, post_weight, total, weight, bias, normed, num_rows, x_stride, added_stride, size, eps, offset,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Computes total = x + norm(added + added_bias), and normed = norm(total), for `rows` rows per program.

    A part whose argument is None is left out. Rows of `total` lie as those of `x`.
    """
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    mask = (row < num_rows) & (column < size)
    values = read(x + row * x_stride + column, mask)
    if added is not None:
        output = read(added + row * added_stride + column, mask)
        if added_bias is not None:
            output += read(added_bias + column, column < size)
        if post_weight is not None:
            output = _normed(output, mask, post_weight, None, column, size, eps, offset)
            output = output.to(post_weight.dtype.element_ty).to(tl.float32)
        rounded = (values + output).to(total.dtype.element_ty)
        tl.store(total + row * x_stride + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    if normed is not None:
        values = _normed(values, mask, weight, bias, column, size, eps, offset)
        write(normed + row * size + column, values, mask)


def tile(size: int, elements: int = 2048) -> dict[str, int]:
    """Returns the tile of a program that has whole rows: about so many elements."""
    block = triton.next_power_of_2(size)
    rows = max(1, elements // block)
    return {"rows": rows, "block": block, "num_warps": min(16, max(4, rows * block // 512))}


def add_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    bias: Tensor | None = None,
    added_bias: Tensor | None = None,
    post_weight: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor | None:
    """Writes x + added, both [rows, size], to `total`, or to `x` without one. Returns the norm of the sum.

    `added_bias` is added to `added` first, and then comes its norm with `post_weight`. Without `added` nothing is
    written, without `weight` nothing is returned. Norms multiply by weight + offset. With `bias` the returned norm is a
    layer norm. Rows of a separate `total` lie as those of `x`.
    """
    num_rows, size = x.shape
    normed = None if weight is None else torch.empty(num_rows, size, dtype=weight.dtype, device=x.device)
    of_program = tile(size)
    launch(
        _norm_forward,
        (triton.cdiv(num_rows, of_program["rows"]),),
        *(x, added, added_bias, post_weight, x if total is None else total, weight, bias, normed, num_rows),
        *(x.stride(0), None if added is None else added.stride(0), size, eps, offset),
        **of_program,
    )
    return normed


# Gated activations.


@triton.jit
def share(x, activation: tl.constexpr):
    """Returns the factor s of x in an activation x * s, and the derivative of x * s.

    SiLU has the logistic function of x. GELU's tanh approximation has that of twice a polynomial (Hendrycks and Gimpel
    2016, arXiv:1606.08415, section 2).
    """
    z, slope = x, 1.0
    if activation == "gelu_tanh":
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
        slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    factor = tl.sigmoid(z)
    return factor, factor * (1 + x * (1 - factor) * slope)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_forward(
    gates, ups, weights, made, num_rows, size, group_size, gate_stride, group_stride, up_stride,
    activation: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Computes activation(gate) * up * weight for some columns of some rows per program.

    Gates can be in groups of `group_size` columns that lie apart. The sigmoid alone is no factor of its gate.
    """
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    mask = (row < num_rows) & (column < size)
    place = column
    if group_size is not None:
        place = column // group_size * group_stride + column % group_size
    x = read(gates + row * gate_stride + place, mask)
    factor, _ = share(x, activation)
    result = (factor if activation == "sigmoid" else x * factor) * read(ups + row * up_stride + column, mask)
    if weights is not None:
        result = result.to(made.dtype.element_ty).to(tl.float32) * read(weights + row, row < num_rows)
    write(made + row * size + column, result, mask)


def grid_of_gates(num_rows: int, size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid of programs for [rows, size], and the tile of each."""
    block = min(COLUMNS, triton.next_power_of_2(size))
    rows = COLUMNS // block
    return (triton.cdiv(num_rows, rows), triton.cdiv(size, block)), {"rows": rows, "block": block}


def gate_rows(gates: Tensor, ups: Tensor, activation: str, weights: Tensor | None = None) -> Tensor:
    """Returns activation(gates) * ups * weights, shape [rows, columns] of `ups`, whose rows may lie apart.

    `gates` has as many elements in each row, of shape [rows, columns] or [rows, groups, columns of a group]. `weights`
    [rows, 1] are fp32, and the product before them is rounded. The activation is silu, gelu_tanh or sigmoid.
    """
    num_rows, size = ups.shape
    made = ups.new_empty(num_rows, size)
    groups = (gates.size(2), gates.stride(1)) if gates.dim() == 3 else (None, None)
    grid, of_program = grid_of_gates(num_rows, size)
    launch(
        _gate_forward,
        grid,
        *(gates, ups, weights, made, num_rows, size, groups[0], gates.stride(0), groups[1], ups.stride(0)),
        activation=activation,
        **of_program,
    )
    return made


# Norms of heads and their rotation: Su et al. 2021, "RoFormer".


@triton.jit
def read_head(pointers, first, second, rest, in_half, in_rest):
    """Returns the two halves that are rotated together, and the elements that are not, as fp32."""
    return read(pointers + first, in_half), read(pointers + second, in_half), read(pointers + rest, in_rest)


@triton.jit
def write_head(pointers, first, second, rest, in_half, in_rest, a, b, c):
    """Rounds and stores the halves and the rest of a head."""
    write(pointers + first, a, in_half)
    write(pointers + second, b, in_half)
    write(pointers + rest, c, in_rest)


@triton.jit
def columns_of_head(head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, half_block: tl.constexpr,
                    rest_block: tl.constexpr):  # fmt: skip
    """Returns a head's columns: those of the halves in inputs and in results, the others, and which of them exist."""
    column, rest = tl.arange(0, half_block), 2 * half + tl.arange(0, rest_block)
    first, second = (2 * column, 2 * column + 1) if is_pairs else (column, column + half)
    return first, second, column, column + half, rest, column < half, rest < head_dim


@triton.jit
def copy_heads(
    source, target, row, place, num_rows, num_heads, token_stride, head_stride, place_stride, target_head_stride,
    head_dim: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """Copies heads `row` of tokens' heads. A token's heads go to row `place` of the target."""
    token, head, column = (row // num_heads).to(tl.int64), row % num_heads, tl.arange(0, head_block)[None, :]
    mask = (row < num_rows)[:, None] & (column < head_dim)
    given = tl.load(source + (token * token_stride + head * head_stride)[:, None] + column, mask=mask, other=0.0)
    tl.store(target + (place * place_stride + head * target_head_stride)[:, None] + column, given, mask=mask)


@triton.jit
def _turn_rows(
    x, made, weight, cos, sin, angle_rows, row, place, num_rows, num_heads, group, token_stride, group_stride,
    angle_stride, place_stride, head_stride, eps, offset, head_dim: tl.constexpr, half: tl.constexpr,
    is_pairs: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates heads `row`. Number t * num_heads + h is head h of token t, and h // group its group."""
    is_there = row < num_rows
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    source = x + (token * token_stride + (head // group) * group_stride + (head % group) * head_dim)[:, None]
    first, second, half_1, half_2, others, in_half, in_rest = columns_of_head(
        head_dim, half, is_pairs, half_block, rest_block
    )
    mask, rest_mask = is_there[:, None] & in_half[None, :], is_there[:, None] & in_rest[None, :]
    a, b, rest = read_head(source, first[None, :], second[None, :], others[None, :], mask, rest_mask)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1) + tl.sum(rest * rest, 1)
        scale = inverse_rms(squares, head_dim, eps)[:, None]
        gain_a, gain_b, gain_rest = read_head(weight, first, second, others, in_half, in_rest)
        a, b = a * scale * (gain_a + offset)[None, :], b * scale * (gain_b + offset)[None, :]
        rest = rest * scale * (gain_rest + offset)[None, :]
    angle = token
    if angle_rows is not None:
        angle = tl.load(angle_rows + token, mask=is_there, other=0)
    angle = (angle * angle_stride)[:, None] + half_1[None, :]
    c, s = read(cos + angle, mask), read(sin + angle, mask)
    target = made + (place * place_stride + head * head_stride)[:, None]
    a, b = a * c - b * s, b * c + a * s
    write_head(target, half_1[None, :], half_2[None, :], others[None, :], mask, rest_mask, a, b, rest)


@triton.jit(do_not_specialize=["num_tokens"])
def _turn_forward(
    queries, keys, values, made_queries, made_keys, made_values, query_weight, key_weight, cos, sin, angle_rows, table,
    positions, num_tokens, num_queries, num_keys, group, query_token_stride, query_group_stride, key_token_stride,
    key_group_stride, angle_stride, table_stride, block_tokens, place_stride, head_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, rows: tl.constexpr, half_block: tl.constexpr,
    rest_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates heads. The first programs have those of queries, the others those of keys.

    With a `table` keys go to rows of a cache, and so do values as they are. A row is found by the token's position.
    """
    number = tl.program_id(0)
    num_first = tl.cdiv(num_tokens * num_queries, rows)
    if number < num_first:
        row = number * rows + tl.arange(0, rows)
        _turn_rows(
            queries, made_queries, query_weight, cos, sin, angle_rows, row, (row // num_queries).to(tl.int64),
            num_tokens * num_queries, num_queries, group, query_token_stride, query_group_stride, angle_stride,
            num_queries * head_dim, head_dim, eps, offset, head_dim, half, is_pairs, half_block, rest_block,
        )  # fmt: skip
    else:
        row = (number - num_first) * rows + tl.arange(0, rows)
        place = (row // num_keys).to(tl.int64)
        if table is not None:
            is_there = row < num_tokens * num_keys
            position = tl.load(positions + place, mask=is_there, other=0)
            block = tl.load(table + place * table_stride + position // block_tokens, mask=is_there, other=0)
            place = block.to(tl.int64) * block_tokens + position % block_tokens
            copy_heads(
                values, made_values, row, place, num_tokens * num_keys, num_keys, key_token_stride, key_group_stride,
                place_stride, head_stride, head_dim, head_block,
            )  # fmt: skip
        _turn_rows(
            keys, made_keys, key_weight, cos, sin, angle_rows, row, place, num_tokens * num_keys, num_keys, 1,
            key_token_stride, key_group_stride, angle_stride, place_stride, head_stride, eps, offset,
            head_dim, half, is_pairs, half_block, rest_block,
        )  # fmt: skip


def columns_of(turn: Turn, head_dim: int) -> dict[str, Any]:
    """Returns the constants of kernels for heads of a size."""
    rest = head_dim - 2 * turn.half
    return {
        "head_dim": head_dim,
        "half": turn.half,
        "is_pairs": turn.pairs,
        "half_block": triton.next_power_of_2(turn.half),
        "rest_block": triton.next_power_of_2(max(1, rest)),
        "head_block": triton.next_power_of_2(head_dim),
    }


def turn_heads(
    queries: Tensor,
    keys: Tensor,
    turn: Turn,
    values: Tensor | None = None,
    written: tuple[Tensor, Tensor, Tensor, Tensor, int, int, int] | None = None,
    *,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor | None]:
    """Returns normalized and rotated queries [tokens, groups * heads of a group, head_dim] and keys [tokens, groups,
    head_dim], contiguous, from queries [tokens, groups, heads of a group, head_dim] and keys of the result's shape.

    With `written`, a `Written` of a cache, keys and `values` are stored there, and the returned keys are None. Values
    must have the strides of keys. A program has `rows` heads.
    """
    num_tokens, groups, group, head_dim = queries.shape
    num_keys = keys.size(1)
    made_queries = torch.empty(num_tokens, groups * group, head_dim, device=queries.device, dtype=queries.dtype)
    made_keys, table = None, None
    if written is None:
        made_keys = torch.empty(num_tokens, num_keys, head_dim, device=keys.device, dtype=keys.dtype)
        places: Sequence[Any] = (made_keys, None, None, None, None, num_keys * head_dim, head_dim)
    else:
        places, table = written, written[2]
    into_keys, into_values, _, positions, block_tokens, *strides = places
    launch(
        _turn_forward,
        (sum(triton.cdiv(num_tokens * number, rows) for number in (groups * group, num_keys)),),
        *(queries, keys, values, made_queries, into_keys, into_values, *(turn.norms or (None, None))),
        *(turn.cos, turn.sin, turn.angle_rows, table, positions),
        *(num_tokens, groups * group, num_keys, group, *queries.stride()[:2], *keys.stride()[:2], turn.cos.stride(0)),
        *(None if table is None else table.stride(0), block_tokens, *strides, turn.eps, turn.offset),
        rows=rows,
        **columns_of(turn, head_dim),
    )
    return made_queries, made_keys
