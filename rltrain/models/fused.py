"""Formulas of a layer as single Triton kernels, with gradients: norms, head norms with rotation, gated activations.

Import this module only if Triton is installed; `attention.fused_kernels` returns it where its kernels hold. Arithmetic
is fp32, and every output is rounded once. Backward recomputes what a formula needs from its inputs. Sums over tokens,
for gradients of norms' weights, are first made per program and then added by another kernel.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 16
"""Heads that a program rotates at a time."""
COLUMNS = 1024
"""Elements that a program of a gated activation takes: of one row, or of several short ones."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel. All launches of this module pass here, so that benchmarks can count them."""
    kernel[grid](*arguments, **constants)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """Returns the number of a GPU's multiprocessors. Other devices interpret kernels, and count as four."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _num_programs(x: Tensor, most: int) -> int:
    """Returns the number of programs that share rows, at most `most`: a few for each multiprocessor."""
    return max(1, min(most, 4 * _num_multiprocessors(x.device)))


@triton.jit
def _sum_parts(parts, first, second, num_first, num_parts, size, block: tl.constexpr, rows: tl.constexpr):
    """Adds the first `num_first` of parts [num_parts, size], and the others in programs with 1 as their second
    index."""
    is_second = tl.program_id(1) == 1
    column = tl.program_id(0) * block + tl.arange(0, block)
    start = tl.where(is_second, num_first, 0)
    end = tl.where(is_second, num_parts, num_first)
    total = tl.zeros([rows, block], tl.float32)
    for row in range(start, end, rows):
        here = row + tl.arange(0, rows)
        mask = (here < end)[:, None] & (column < size)[None, :]
        total += tl.load(parts + here[:, None] * size + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if is_second:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=column < size)
    else:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=column < size)


def _summed(parts: Tensor, num_first: int, first: Tensor, second: Tensor | None = None) -> None:
    """Writes the sums of two sections of parts [parts, size] to `first` and `second`."""
    size = parts.size(1)
    grid = triton.cdiv(size, 128), 1 if second is None else 2
    other = first if second is None else second
    launch(_sum_parts, grid, parts, first, other, num_first, len(parts), size, block=128, rows=ROWS)


# RMS norms of rows, with an addition before: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".


@triton.jit
def _norm_forward(
    x, added, weight, total, normed, num_rows, size, eps, offset, has_added: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Normalizes `rows` rows per program. With `has_added` a row is the rounded sum of two, and `total` gets it."""
    row, column = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, block)
    mask = (row < num_rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if has_added:
        values += tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 1) / size + eps)
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
    result = values * scale[:, None] * gain[None, :]
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    gradient, of_total, total, weight, of_rows, parts, num_rows, size, eps, offset,
    has_of_total: tl.constexpr, has_parts: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of rows, and this program's part of the gradient of the weight."""
    column = tl.arange(0, block)
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
    part = tl.zeros([block], tl.float32)
    for start in range(tl.program_id(0) * rows, num_rows, tl.num_programs(0) * rows):
        row = start + tl.arange(0, rows).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        values = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
        given = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
        scale = (1 / tl.sqrt(tl.sum(values * values, 1) / size + eps))[:, None]
        values *= scale
        if has_parts:
            part += tl.sum(given * values, 0)
        given *= gain[None, :]
        result = (given - values * (tl.sum(given * values, 1) / size)[:, None]) * scale
        if has_of_total:
            result += tl.load(of_total + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(of_rows + place, result.to(of_rows.dtype.element_ty), mask=mask)
    if has_parts:
        tl.store(parts + tl.program_id(0) * size + column, part, mask=column < size)


def _tile(size: int, elements: int = 2048) -> dict[str, int]:
    """Returns the tile of a program that has whole rows: about so many elements."""
    block = triton.next_power_of_2(size)
    rows = max(1, elements // block)
    return {"rows": rows, "block": block, "num_warps": min(16, max(4, rows * block // 512))}


class _AddedNorm(torch.autograd.Function):
    """Computes total = x + added and the norm of its rows, [..., size] both. The weight is [size].

    The total has the wider type of the two, the norm the weight's type. `added` None adds nothing. The norm multiplies
    by weight + offset.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float) -> Any:
        """Returns the total and the norm, or only the norm if nothing is added."""
        x, added = x.contiguous(), None if added is None else added.contiguous()
        total = x if added is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, added.dtype))
        normed = torch.empty_like(x, dtype=weight.dtype)
        size = x.size(-1)
        num_rows, tile, other = x.numel() // size, _tile(size), x if added is None else added
        grid, numbers = (triton.cdiv(num_rows, tile["rows"]),), (num_rows, size, eps, offset)
        launch(_norm_forward, grid, x, other, weight, total, normed, *numbers, has_added=added is not None, **tile)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.offset, ctx.types = eps, offset, (x.dtype, None if added is None else added.dtype)
        ctx.set_materialize_grads(False)
        return normed if added is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        *of_totals, of_normed = gradients
        of_rows, of_weight = of_totals[0] if of_totals else None, None
        if of_normed is not None:
            of_rows, of_weight = _norm_gradients(ctx, of_normed, of_rows, total, weight)
        of_x, of_added = (None if kind is None or of_rows is None else of_rows.to(kind) for kind in ctx.types)
        return of_x, of_added, of_weight, None, None


def _norm_gradients(
    ctx: Any, of_normed: Tensor, of_total: Tensor | None, total: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    size = total.size(-1)
    num_rows = total.numel() // size
    of_rows, of_normed = torch.empty_like(total), of_normed.contiguous()
    needs_weight = ctx.needs_input_grad[2]
    tile = _tile(size)
    programs = _num_programs(total, triton.cdiv(num_rows, tile["rows"]))
    parts = torch.empty(programs if needs_weight else 1, size, device=total.device, dtype=torch.float32)
    launch(
        _norm_backward,
        (programs,),
        *(of_normed, of_normed if of_total is None else of_total.contiguous(), total, weight, of_rows, parts),
        *(num_rows, size, ctx.eps, ctx.offset),
        has_of_total=of_total is not None,
        has_parts=needs_weight,
        **tile,
    )
    if not needs_weight:
        return of_rows, None
    of_weight = torch.empty_like(weight)
    _summed(parts, programs, of_weight)
    return of_rows, of_weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Returns x / sqrt(mean x^2 + eps) * (weight + offset) over rows x [..., size], in the weight's type."""
    normed: Tensor = _AddedNorm.apply(x, None, weight, eps, offset)
    return normed


def added_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns x + added, rounded to the wider type, and the norm of this sum, in the weight's type."""
    total, normed = _AddedNorm.apply(x, added, weight, eps, offset)
    return total, normed


# Gated activations.


@triton.jit
def _share(x, is_gelu: tl.constexpr):
    """Returns the factor s of x in an activation x * s, and the derivative of x * s.

    SiLU has the logistic function of x. GELU's tanh approximation has that of twice a polynomial (Hendrycks and Gimpel
    2016, arXiv:1606.08415, section 2).
    """
    z, slope = x, 1.0
    if is_gelu:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
        slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    share = tl.sigmoid(z)
    return share, share * (1 + x * (1 - share) * slope)


@triton.jit
def _gate_forward(
    gate, up, made, num_rows, gate_stride, up_stride, size, is_gelu: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Computes activation(gate) * up for some columns of some rows per program."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    mask = (row < num_rows) & (column < size)
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    share, _ = _share(x, is_gelu)
    tl.store(made + row * size + column, (x * share * y).to(made.dtype.element_ty), mask=mask)


@triton.jit
def _gate_backward(
    gradient, gate, up, of_gate, of_up, num_rows, gate_stride, up_stride, of_gate_stride, of_up_stride, size,
    is_gelu: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of gate and up for some columns of some rows per program."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    mask = (row < num_rows) & (column < size)
    given = tl.load(gradient + row * size + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    share, slope = _share(x, is_gelu)
    of_x = given * y * slope
    tl.store(of_gate + row * of_gate_stride + column, of_x.to(of_gate.dtype.element_ty), mask=mask)
    tl.store(of_up + row * of_up_stride + column, (given * x * share).to(of_up.dtype.element_ty), mask=mask)


def _grid(gate: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, size = gate.shape
    block = min(COLUMNS, triton.next_power_of_2(size))
    rows = COLUMNS // block
    return (triton.cdiv(num_rows, rows), triton.cdiv(size, block)), {"rows": rows, "block": block}


def _made(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    """Returns activation(gate) * up of [rows, size] each, whose rows may lie apart."""
    num_rows, size = gate.shape
    made = torch.empty(num_rows, size, device=gate.device, dtype=gate.dtype)
    grid, tile = _grid(gate)
    launch(_gate_forward, grid, gate, up, made, num_rows, gate.stride(0), up.stride(0), size, is_gelu=is_gelu, **tile)
    return made


def _gate_gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, *, is_gelu: bool
) -> None:
    """Writes the gradients of gate and up, [rows, size] each."""
    num_rows, size = gate.shape
    strides = (x.stride(0) for x in (gate, up, of_gate, of_up))
    grid, tile = _grid(gate)
    launch(_gate_backward, grid, gradient, gate, up, of_gate, of_up, num_rows, *strides, size, is_gelu=is_gelu, **tile)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, is_gelu: bool) -> Tensor:
        gate_up, ctx.is_gelu = gate_up.contiguous(), is_gelu
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.flatten(0, -2).chunk(2, -1)
        made = _made(gate, up, is_gelu)
        return made.view(*gate_up.shape[:-1], gate_up.size(-1) // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_up)
        rows = (*gate_up.flatten(0, -2).chunk(2, -1), *result.flatten(0, -2).chunk(2, -1))
        _gate_gradients(gradients[0].contiguous().flatten(0, -2), *rows, is_gelu=ctx.is_gelu)
        return result, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
        gate, up, ctx.is_gelu = gate.contiguous(), up.contiguous(), is_gelu
        ctx.save_for_backward(gate, up)
        return _made(gate.flatten(0, -2), up.flatten(0, -2), is_gelu).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        rows = (x.flatten(0, -2) for x in (gradients[0].contiguous(), gate, up, of_gate, of_up))
        _gate_gradients(*rows, is_gelu=ctx.is_gelu)
        return of_gate, of_up, None


def gated(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Returns silu(gate) * up for gate and up side by side: [..., 2 n] to [..., n].

    With `is_gelu` the activation is GELU's tanh approximation.
    """
    made: Tensor = _Gated.apply(gate_up, is_gelu)
    return made


def gated_product(gate: Tensor, up: Tensor, is_gelu: bool = False) -> Tensor:
    """Returns the product of `gated` for separate gate and up, [..., n] each."""
    made: Tensor = _GatedProduct.apply(gate, up, is_gelu)
    return made


# Norms of heads and their rotation: Su et al. 2021, "RoFormer".


class Turn(NamedTuple):
    """How heads are normalized and rotated.

    The first `half` elements of rows of `cos` and `sin`, [tokens, at least half], belong to the first 2 * half elements
    of a head. With `pairs` neighbouring elements are rotated together, and the results are written as halves. Without
    `norms` heads are only rotated; norms multiply by the weights of queries and of keys plus `offset`.
    """

    cos: Tensor
    sin: Tensor
    half: int
    pairs: bool = False
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    offset: float = 0.0


@triton.jit
def _three(pointers, first, second, rest, in_half, in_rest):
    """Loads the two halves that are rotated together, and the elements that are not, as fp32."""
    a = tl.load(pointers + first, mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(pointers + second, mask=in_half, other=0.0).to(tl.float32)
    return a, b, tl.load(pointers + rest, mask=in_rest, other=0.0).to(tl.float32)


@triton.jit
def _store_three(pointers, first, second, rest, in_half, in_rest, a, b, c):
    tl.store(pointers + first, a.to(pointers.dtype.element_ty), mask=in_half)
    tl.store(pointers + second, b.to(pointers.dtype.element_ty), mask=in_half)
    tl.store(pointers + rest, c.to(pointers.dtype.element_ty), mask=in_rest)


@triton.jit
def _columns(head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, half_block: tl.constexpr,
             rest_block: tl.constexpr):  # fmt: skip
    """Returns a head's columns: those of the halves in inputs and in results, the others, and which of them exist."""
    column, rest = tl.arange(0, half_block), 2 * half + tl.arange(0, rest_block)
    first, second = (2 * column, 2 * column + 1) if is_pairs else (column, column + half)
    return first, second, column, column + half, rest, column < half, rest < head_dim


@triton.jit
def _turn_rows(
    x, made, weight, cos, sin, first_row, num_rows, num_heads, group, token_stride, group_stride, angle_stride,
    eps, offset, head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, has_norm: tl.constexpr,
    rows: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates `rows` heads. Row t * num_heads + h is head h of token t, and h // group its group."""
    row = first_row + tl.arange(0, rows)
    is_there = (row < num_rows)[:, None]
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    source = x + (token * token_stride + (head // group) * group_stride + (head % group) * head_dim)[:, None]
    first, second, half_1, half_2, others, in_half, in_rest = _columns(head_dim, half, is_pairs, half_block, rest_block)
    mask, rest_mask = is_there & in_half[None, :], is_there & in_rest[None, :]
    a, b, rest = _three(source, first[None, :], second[None, :], others[None, :], mask, rest_mask)
    if has_norm:
        squares = tl.sum(a * a + b * b, 1) + tl.sum(rest * rest, 1)
        scale = (1 / tl.sqrt(squares / head_dim + eps))[:, None]
        gain_a, gain_b, gain_rest = _three(weight, first, second, others, in_half, in_rest)
        a, b = a * scale * (gain_a + offset)[None, :], b * scale * (gain_b + offset)[None, :]
        rest = rest * scale * (gain_rest + offset)[None, :]
    angle = (token * angle_stride)[:, None] + half_1[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    target, columns = made + (row.to(tl.int64) * head_dim)[:, None], (half_1[None, :], half_2[None, :], others[None, :])
    _store_three(target, columns[0], columns[1], columns[2], mask, rest_mask, a * c - b * s, b * c + a * s, rest)


@triton.jit
def _turn_forward(
    queries, keys, made_queries, made_keys, query_weight, key_weight, cos, sin, num_tokens, num_queries, num_keys,
    group, query_token_stride, query_group_stride, key_token_stride, key_group_stride, angle_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, has_norm: tl.constexpr, rows: tl.constexpr,
    half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates heads. The first programs have those of queries, the others those of keys."""
    number = tl.program_id(0)
    num_first = tl.cdiv(num_tokens * num_queries, rows)
    if number < num_first:
        _turn_rows(
            queries, made_queries, query_weight, cos, sin, number * rows, num_tokens * num_queries, num_queries, group,
            query_token_stride, query_group_stride, angle_stride, eps, offset,
            head_dim, half, is_pairs, has_norm, rows, half_block, rest_block,
        )  # fmt: skip
    else:
        _turn_rows(
            keys, made_keys, key_weight, cos, sin, (number - num_first) * rows, num_tokens * num_keys, num_keys, 1,
            key_token_stride, key_group_stride, angle_stride, eps, offset,
            head_dim, half, is_pairs, has_norm, rows, half_block, rest_block,
        )  # fmt: skip


@triton.jit
def _turn_back_rows(
    gradient, x, of_x, weight, cos, sin, part, first_row, step_rows, num_rows, num_heads, group,
    token_stride, group_stride, of_token_stride, of_group_stride, angle_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, has_norm: tl.constexpr,
    has_parts: tl.constexpr, rows: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of heads, `rows` at a time, and this program's part of the weight's gradient."""
    first, second, half_1, half_2, others, in_half, in_rest = _columns(head_dim, half, is_pairs, half_block, rest_block)
    part_a, part_b = tl.zeros([half_block], tl.float32), tl.zeros([half_block], tl.float32)
    part_rest = tl.zeros([rest_block], tl.float32)
    for start in range(first_row, num_rows, step_rows):
        row = start + tl.arange(0, rows)
        is_there = (row < num_rows)[:, None]
        mask, rest_mask = is_there & in_half[None, :], is_there & in_rest[None, :]
        token, head = (row // num_heads).to(tl.int64), row % num_heads
        place = (head % group) * head_dim
        given = gradient + (row.to(tl.int64) * head_dim)[:, None]
        turned_a, turned_b, of_rest = _three(
            given, half_1[None, :], half_2[None, :], others[None, :], mask, rest_mask
        )  # fmt: skip
        angle = (token * angle_stride)[:, None] + half_1[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        of_a, of_b = turned_a * c + turned_b * s, turned_b * c - turned_a * s
        if has_norm:
            source = x + (token * token_stride + (head // group) * group_stride + place)[:, None]
            a, b, rest = _three(source, first[None, :], second[None, :], others[None, :], mask, rest_mask)
            squares = tl.sum(a * a + b * b, 1) + tl.sum(rest * rest, 1)
            scale = (1 / tl.sqrt(squares / head_dim + eps))[:, None]
            a, b, rest = a * scale, b * scale, rest * scale
            part_a, part_b = part_a + tl.sum(of_a * a, 0), part_b + tl.sum(of_b * b, 0)
            part_rest += tl.sum(of_rest * rest, 0)
            gain_a, gain_b, gain_rest = _three(weight, first, second, others, in_half, in_rest)
            of_a, of_b = of_a * (gain_a + offset)[None, :], of_b * (gain_b + offset)[None, :]
            of_rest *= (gain_rest + offset)[None, :]
            along = ((tl.sum(of_a * a + of_b * b, 1) + tl.sum(of_rest * rest, 1)) / head_dim)[:, None]
            of_a, of_b, of_rest = (
                (of_a - a * along) * scale,
                (of_b - b * along) * scale,
                (of_rest - rest * along) * scale,
            )
        target = of_x + (token * of_token_stride + (head // group) * of_group_stride + place)[:, None]
        _store_three(target, first[None, :], second[None, :], others[None, :], mask, rest_mask, of_a, of_b, of_rest)
    if has_parts:
        _store_three(part, first, second, others, in_half, in_rest, part_a, part_b, part_rest)


@triton.jit
def _turn_backward(
    of_queries, of_keys, of_values, queries, keys, into_queries, into_keys, into_values, query_weight, key_weight,
    cos, sin, parts, num_first, num_tokens, num_queries, num_keys, group,
    query_token_stride, query_group_stride, key_token_stride, key_group_stride,
    into_query_token, into_query_group, into_key_token, into_key_group, value_token, value_head,
    angle_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, has_norm: tl.constexpr,
    has_parts: tl.constexpr, has_values: tl.constexpr, rows: tl.constexpr, half_block: tl.constexpr,
    rest_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of heads. The first programs take queries. The others take keys, and copy values."""
    number, count = tl.program_id(0), tl.num_programs(0)
    if number < num_first:
        _turn_back_rows(
            of_queries, queries, into_queries, query_weight, cos, sin, parts + number * head_dim,
            number * rows, num_first * rows, num_tokens * num_queries, num_queries, group,
            query_token_stride, query_group_stride, into_query_token, into_query_group, angle_stride, eps,
            offset,
            head_dim, half, is_pairs, has_norm, has_parts, rows, half_block, rest_block,
        )  # fmt: skip
    else:
        first, step = (number - num_first) * rows, (count - num_first) * rows
        _turn_back_rows(
            of_keys, keys, into_keys, key_weight, cos, sin, parts + number * head_dim,
            first, step, num_tokens * num_keys, num_keys, 1,
            key_token_stride, key_group_stride, into_key_token, into_key_group, angle_stride, eps,
            offset,
            head_dim, half, is_pairs, has_norm, has_parts, rows, half_block, rest_block,
        )  # fmt: skip
        if has_values:
            column = tl.arange(0, head_block)
            for start in range(first, num_tokens * num_keys, step):
                row = start + tl.arange(0, rows)
                mask = (row < num_tokens * num_keys)[:, None] & (column < head_dim)[None, :]
                token, head = (row // num_keys).to(tl.int64), row % num_keys
                given = of_values + (token * value_token + head * value_head)[:, None] + column[None, :]
                target = into_values + (token * into_key_token + head * into_key_group)[:, None] + column[None, :]
                tl.store(target, tl.load(given, mask=mask, other=0.0), mask=mask)


def _columns_of(turn: Turn, head_dim: int) -> dict[str, Any]:
    rest = head_dim - 2 * turn.half
    return {
        "head_dim": head_dim,
        "half": turn.half,
        "is_pairs": turn.pairs,
        "has_norm": turn.norms is not None,
        "rows": ROWS,
        "half_block": triton.next_power_of_2(turn.half),
        "rest_block": triton.next_power_of_2(max(1, rest)),
    }


def _turned(queries: Tensor, keys: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Returns normalized and rotated queries [tokens, groups * heads of a group, head_dim] and keys [tokens, groups,
    head_dim], contiguous, from queries [tokens, groups, heads of a group, head_dim] and keys of the result's shape."""
    num_tokens, groups, group, head_dim = queries.shape
    num_keys = keys.size(1)
    made_queries = torch.empty(num_tokens, groups * group, head_dim, device=queries.device, dtype=queries.dtype)
    made_keys = torch.empty(num_tokens, num_keys, head_dim, device=keys.device, dtype=keys.dtype)
    counts = num_tokens * groups * group, num_tokens * num_keys
    launch(
        _turn_forward,
        (sum(triton.cdiv(count, ROWS) for count in counts),),
        *(queries, keys, made_queries, made_keys, *(turn.norms or (keys, keys)), turn.cos, turn.sin),
        *(num_tokens, groups * group, num_keys, group, *queries.stride()[:2], *keys.stride()[:2]),
        *(turn.cos.stride(0), turn.eps, turn.offset),
        **_columns_of(turn, head_dim),
    )
    return made_queries, made_keys


class _Rows(NamedTuple):
    """Views of the same memory as heads: queries [tokens, groups, heads of a group, head_dim], keys and values [tokens,
    groups, head_dim]. Heads need not be next to each other."""

    queries: Tensor
    keys: Tensor
    values: Tensor | None = None


def _turned_back(
    gradients: _Rows, heads: _Rows, into: _Rows, turn: Turn, needs_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of `heads` to `into`. Returns those of the norms' weights.

    `gradients` are those of `_turned`, with the shape of its results, and of the values.
    """
    num_tokens, groups, group, head_dim = heads.queries.shape
    num_keys = heads.keys.size(1)
    counts = [triton.cdiv(num_tokens * number, ROWS) for number in (groups * group, num_keys)]
    programs = _num_programs(heads.queries, max(1, sum(counts)))
    num_first = min(max(1, round(programs * counts[0] / max(1, sum(counts)))), max(1, programs - 1))
    programs = max(programs, num_first + 1)
    shape = (programs, head_dim) if needs_weights else (1, 1)
    parts = torch.empty(shape, device=heads.queries.device, dtype=torch.float32)
    values, of_values = (heads.keys if x is None else x for x in (into.values, gradients.values))
    launch(
        _turn_backward,
        (programs,),
        *(gradients.queries.contiguous(), gradients.keys.contiguous(), of_values, heads.queries, heads.keys),
        *(into.queries, into.keys, values, *(turn.norms or (heads.keys, heads.keys)), turn.cos, turn.sin, parts),
        *(num_first, num_tokens, groups * group, num_keys, group),
        *(*heads.queries.stride()[:2], *heads.keys.stride()[:2]),
        *(*into.queries.stride()[:2], *into.keys.stride()[:2], *of_values.stride()[:2]),
        *(turn.cos.stride(0), turn.eps, turn.offset),
        has_parts=needs_weights,
        has_values=into.values is not None,
        head_block=triton.next_power_of_2(head_dim),
        **_columns_of(turn, head_dim),
    )
    if not needs_weights:
        return None, None
    assert turn.norms is not None
    of_queries, of_keys = (torch.empty_like(weight) for weight in turn.norms)
    _summed(parts, num_first, of_queries, of_keys)
    return of_queries, of_keys


def _rows_of(heads: Tensor) -> _Rows:
    return _Rows(heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1])


class _TurnedGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, turn: Turn) -> Any:
        rows = _rows_of(heads)
        ctx.turn, ctx.shape, ctx.kind = turn._replace(norms=None), heads.shape, heads.dtype
        has_norms = query_weight is not None and key_weight is not None
        # Without norms the gradients depend on the angles alone.
        ctx.save_for_backward(*((heads, query_weight, key_weight) if has_norms else ()))
        return *_turned(rows.queries, rows.keys, turn), rows.values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result = torch.empty(ctx.shape, device=gradients[0].device, dtype=ctx.kind)
        heads, *weights = ctx.saved_tensors or (result,)
        turn = ctx.turn._replace(norms=tuple(weights)) if weights else ctx.turn
        needs_weights = bool(weights) and any(ctx.needs_input_grad[1:3])
        made = _turned_back(_Rows(*gradients), _rows_of(heads), _rows_of(result), turn, needs_weights)
        return result, *made, None


class _TurnedPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        ctx.turn = turn
        return _turned(queries[:, None], keys, turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        into = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in gradients]
        rows = _Rows(into[0][:, None], into[1])
        _turned_back(_Rows(*gradients), rows, rows, ctx.turn, False)
        return into[0], into[1], None


def turned_groups(heads: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [tokens, all queries, head_dim], keys and values [tokens, groups, head_dim].

    `heads` [tokens, groups, heads of a group, head_dim] have a group's queries, then its key, then its value. Queries
    and keys are normalized and rotated. The values are those of `heads`, in their memory.
    """
    turned: tuple[Tensor, Tensor, Tensor] = _TurnedGroups.apply(heads.contiguous(), *(turn.norms or (None, None)), turn)
    return turned


def turned_pair(queries: Tensor, keys: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Returns rotated queries and keys [tokens, heads, head_dim]."""
    assert turn.norms is None, "norms come before"
    in_rows = (x if x.stride()[1:] == (x.size(2), 1) else x.contiguous() for x in (queries, keys))
    turned: tuple[Tensor, Tensor] = _TurnedPair.apply(*in_rows, turn)
    return turned
