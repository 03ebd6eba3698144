"""Formulas of a layer as single Triton kernels, with gradients: norms, head norms with rotation, gated activations.

Import this module only if Triton is installed; `attention.fused_kernels` returns it where its kernels hold. Forward
kernels are those of `layer_kernels`. Backward recomputes what a formula needs from its inputs. Sums over tokens, for
gradients of norms' weights, are first made per program and then added by another kernel.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models import layer_kernels
from rltrain.models.attention import Turn
from rltrain.models.layer_kernels import (
    ROWS,
    columns_of_head,
    copy_heads,
    inverse_rms,
    read,
    read_head,
    share,
    write,
    write_head,
)


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
    layer_kernels.launch(_sum_parts, grid, parts, first, other, num_first, len(parts), size, block=128, rows=ROWS)


# RMS norms of rows, with an addition before.


@triton.jit
def _norm_backward(
    gradient, of_total, total, weight, of_rows, parts, num_rows, size, eps, offset, rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of rows, and this program's part of the gradient of the weight."""
    column = tl.arange(0, block)
    gain = read(weight + column, column < size) + offset
    part = tl.zeros([block], tl.float32)
    for start in range(tl.program_id(0) * rows, num_rows, tl.num_programs(0) * rows):
        row = start + tl.arange(0, rows).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        values, given = read(total + place, mask), read(gradient + place, mask)
        scale = inverse_rms(tl.sum(values * values, 1), size, eps)[:, None]
        values *= scale
        if parts is not None:
            part += tl.sum(given * values, 0)
        given *= gain[None, :]
        result = (given - values * (tl.sum(given * values, 1) / size)[:, None]) * scale
        if of_total is not None:
            result += read(of_total + place, mask)
        write(of_rows + place, result, mask)
    if parts is not None:
        tl.store(parts + tl.program_id(0) * size + column, part, mask=column < size)


class _AddedNorm(torch.autograd.Function):
    """Computes total = x + added and the norm of its rows, [..., size] both. The weight is [size].

    The total has the wider type of the two, the norm the weight's type. `added` None adds nothing. The norm multiplies
    by weight + offset.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float) -> Any:
        """Returns the total and the norm, or only the norm if nothing is added."""
        size, x, added, total = x.size(-1), x.contiguous(), None if added is None else added.contiguous(), None
        if added is not None:
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, added.dtype))
        of_added, of_total = (None if one is None else one.view(-1, size) for one in (added, total))
        rows = layer_kernels.add_norm(x.view(-1, size), of_added, weight, eps=eps, offset=offset, total=of_total)
        assert rows is not None
        normed = rows.view(x.shape)
        ctx.save_for_backward(x if total is None else total, weight)
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
    of_rows, of_weight, parts = torch.empty_like(total), None, None
    tile = layer_kernels.tile(size)
    programs = _num_programs(total, triton.cdiv(num_rows, tile["rows"]))
    if ctx.needs_input_grad[2]:
        of_weight = torch.empty_like(weight)
        parts = torch.empty(programs, size, device=total.device, dtype=torch.float32)
    layer_kernels.launch(
        _norm_backward,
        (programs,),
        *(of_normed.contiguous(), None if of_total is None else of_total.contiguous(), total, weight, of_rows, parts),
        *(num_rows, size, ctx.eps, ctx.offset),
        **tile,
    )
    if of_weight is not None and parts is not None:
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
def _gate_backward(
    gradient, gate, up, of_gate, of_up, num_rows, gate_stride, up_stride, of_gate_stride, of_up_stride, size,
    activation: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of gate and up for some columns of some rows per program."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    mask = (row < num_rows) & (column < size)
    given = read(gradient + row * size + column, mask)
    x, y = read(gate + row * gate_stride + column, mask), read(up + row * up_stride + column, mask)
    factor, slope = share(x, activation)
    write(of_gate + row * of_gate_stride + column, given * y * slope, mask)
    write(of_up + row * of_up_stride + column, given * x * factor, mask)


def _gate_gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor, *, activation: str
) -> None:
    """Writes the gradients of gate and up, [rows, size] each, whose rows may lie apart."""
    num_rows, size = gate.shape
    strides = (x.stride(0) for x in (gate, up, of_gate, of_up))
    grid, tile = layer_kernels.grid_of_gates(num_rows, size)
    tensors = gradient, gate, up, of_gate, of_up
    layer_kernels.launch(_gate_backward, grid, *tensors, num_rows, *strides, size, activation=activation, **tile)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        gate_up, ctx.activation = gate_up.contiguous(), activation
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.flatten(0, -2).chunk(2, -1)
        made = layer_kernels.gate_rows(gate, up, activation)
        return made.view(*gate_up.shape[:-1], gate_up.size(-1) // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_up)
        rows = (*gate_up.flatten(0, -2).chunk(2, -1), *result.flatten(0, -2).chunk(2, -1))
        _gate_gradients(gradients[0].contiguous().flatten(0, -2), *rows, activation=ctx.activation)
        return result, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gate, up, ctx.activation = gate.contiguous(), up.contiguous(), activation
        ctx.save_for_backward(gate, up)
        return layer_kernels.gate_rows(gate.flatten(0, -2), up.flatten(0, -2), activation).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        rows = (x.flatten(0, -2) for x in (gradients[0].contiguous(), gate, up, of_gate, of_up))
        _gate_gradients(*rows, activation=ctx.activation)
        return of_gate, of_up, None


def gated(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Returns silu(gate) * up for gate and up side by side: [..., 2 n] to [..., n].

    With `is_gelu` the activation is GELU's tanh approximation.
    """
    made: Tensor = _Gated.apply(gate_up, "gelu_tanh" if is_gelu else "silu")
    return made


def gated_product(gate: Tensor, up: Tensor, is_gelu: bool = False) -> Tensor:
    """Returns the product of `gated` for separate gate and up, [..., n] each."""
    made: Tensor = _GatedProduct.apply(gate, up, "gelu_tanh" if is_gelu else "silu")
    return made


# Norms of heads and their rotation.


@triton.jit
def _turn_back_rows(
    gradient, x, of_x, weight, cos, sin, parts, number, first_row, step_rows, num_rows, num_heads, group,
    token_stride, group_stride, of_token_stride, of_group_stride, angle_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, rows: tl.constexpr, half_block: tl.constexpr,
    rest_block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of heads, `rows` at a time, and this program's part of the weight's gradient."""
    first, second, half_1, half_2, others, in_half, in_rest = columns_of_head(
        head_dim, half, is_pairs, half_block, rest_block
    )
    part_a, part_b = tl.zeros([half_block], tl.float32), tl.zeros([half_block], tl.float32)
    part_rest = tl.zeros([rest_block], tl.float32)
    for start in range(first_row, num_rows, step_rows):
        row = start + tl.arange(0, rows)
        is_there = (row < num_rows)[:, None]
        mask, rest_mask = is_there & in_half[None, :], is_there & in_rest[None, :]
        token, head = (row // num_heads).to(tl.int64), row % num_heads
        place = (head % group) * head_dim
        given = gradient + (row.to(tl.int64) * head_dim)[:, None]
        turned_a, turned_b, of_rest = read_head(
            given, half_1[None, :], half_2[None, :], others[None, :], mask, rest_mask
        )  # fmt: skip
        angle = (token * angle_stride)[:, None] + half_1[None, :]
        c, s = read(cos + angle, mask), read(sin + angle, mask)
        of_a, of_b = turned_a * c + turned_b * s, turned_b * c - turned_a * s
        if weight is not None:
            source = x + (token * token_stride + (head // group) * group_stride + place)[:, None]
            a, b, rest = read_head(source, first[None, :], second[None, :], others[None, :], mask, rest_mask)
            scale = inverse_rms(tl.sum(a * a + b * b, 1) + tl.sum(rest * rest, 1), head_dim, eps)[:, None]
            a, b, rest = a * scale, b * scale, rest * scale
            part_a, part_b = part_a + tl.sum(of_a * a, 0), part_b + tl.sum(of_b * b, 0)
            part_rest += tl.sum(of_rest * rest, 0)
            gain_a, gain_b, gain_rest = read_head(weight, first, second, others, in_half, in_rest)
            of_a, of_b = of_a * (gain_a + offset)[None, :], of_b * (gain_b + offset)[None, :]
            of_rest *= (gain_rest + offset)[None, :]
            along = ((tl.sum(of_a * a + of_b * b, 1) + tl.sum(of_rest * rest, 1)) / head_dim)[:, None]
            of_a, of_b, of_rest = (
                (of_a - a * along) * scale,
                (of_b - b * along) * scale,
                (of_rest - rest * along) * scale,
            )
        target = of_x + (token * of_token_stride + (head // group) * of_group_stride + place)[:, None]
        write_head(target, first[None, :], second[None, :], others[None, :], mask, rest_mask, of_a, of_b, of_rest)
    if parts is not None:
        write_head(parts + number * head_dim, first, second, others, in_half, in_rest, part_a, part_b, part_rest)


@triton.jit
def _turn_backward(
    of_queries, of_keys, of_values, queries, keys, into_queries, into_keys, into_values, query_weight, key_weight,
    cos, sin, parts, num_first, num_tokens, num_queries, num_keys, group,
    query_token_stride, query_group_stride, key_token_stride, key_group_stride,
    into_query_token, into_query_group, into_key_token, into_key_group, value_token, value_head,
    angle_stride, eps, offset,
    head_dim: tl.constexpr, half: tl.constexpr, is_pairs: tl.constexpr, rows: tl.constexpr, half_block: tl.constexpr,
    rest_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """Computes gradients of heads. The first programs take queries. The others take keys, and copy values."""
    number, count = tl.program_id(0), tl.num_programs(0)
    if number < num_first:
        _turn_back_rows(
            of_queries, queries, into_queries, query_weight, cos, sin, parts, number,
            number * rows, num_first * rows, num_tokens * num_queries, num_queries, group,
            query_token_stride, query_group_stride, into_query_token, into_query_group, angle_stride, eps,
            offset,
            head_dim, half, is_pairs, rows, half_block, rest_block,
        )  # fmt: skip
    else:
        first, step, num_rows = (number - num_first) * rows, (count - num_first) * rows, num_tokens * num_keys
        _turn_back_rows(
            of_keys, keys, into_keys, key_weight, cos, sin, parts, number,
            first, step, num_rows, num_keys, 1,
            key_token_stride, key_group_stride, into_key_token, into_key_group, angle_stride, eps,
            offset,
            head_dim, half, is_pairs, rows, half_block, rest_block,
        )  # fmt: skip
        if into_values is not None:
            for start in range(first, num_rows, step):
                row = start + tl.arange(0, rows)
                copy_heads(
                    of_values, into_values, row, (row // num_keys).to(tl.int64), num_rows, num_keys,
                    value_token, value_head, into_key_token, into_key_group, head_dim, head_block,
                )  # fmt: skip


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

    `gradients` are those of `turn_heads`, with the shape of its results, and of the values.
    """
    num_tokens, groups, group, head_dim = heads.queries.shape
    num_keys = heads.keys.size(1)
    counts = [triton.cdiv(num_tokens * number, ROWS) for number in (groups * group, num_keys)]
    programs = _num_programs(heads.queries, max(1, sum(counts)))
    num_first = min(max(1, round(programs * counts[0] / max(1, sum(counts)))), max(1, programs - 1))
    programs = max(programs, num_first + 1)
    parts = None
    if needs_weights:
        parts = torch.empty(programs, head_dim, device=heads.queries.device, dtype=torch.float32)
    value_strides = (None, None) if gradients.values is None else gradients.values.stride()[:2]
    layer_kernels.launch(
        _turn_backward,
        (programs,),
        *(gradients.queries.contiguous(), gradients.keys.contiguous(), gradients.values),
        *(heads.queries, heads.keys, *into, *(turn.norms or (None, None)), turn.cos, turn.sin, parts),
        *(num_first, num_tokens, groups * group, num_keys, group),
        *(*heads.queries.stride()[:2], *heads.keys.stride()[:2]),
        *(*into.queries.stride()[:2], *into.keys.stride()[:2], *value_strides),
        *(turn.cos.stride(0), turn.eps, turn.offset),
        rows=ROWS,
        **layer_kernels.columns_of(turn, head_dim),
    )
    if parts is None or turn.norms is None:
        return None, None
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
        return *layer_kernels.turn_heads(rows.queries, rows.keys, turn), rows.values

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
    def forward(ctx: Any, queries: Tensor, keys: Tensor, turn: Turn) -> Any:
        ctx.turn = turn
        return layer_kernels.turn_heads(queries[:, None], keys, turn)

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


def check(device: torch.device) -> None:
    """Raises an error if kernels fail on `device`, or if their results or gradients differ from those of torch."""
    generator, eps = torch.Generator().manual_seed(0), 1e-6
    shapes = (3, 96), (3, 96), (96,), (16,), (16,)
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    angles = torch.randn(3, 8, generator=generator).to(device)
    cos, sin = angles.cos(), angles.sin()

    def by_kernels(x: Tensor, added: Tensor, weight: Tensor, *norms: Tensor) -> list[Tensor]:
        total, normed = added_norm(x, added, weight, eps)
        turn = Turn(cos, sin, 8, norms=(norms[0], norms[1]), eps=eps)
        return [total, gated(normed), *turned_groups(normed.view(3, 1, 6, 16), turn)]

    def by_torch(x: Tensor, added: Tensor, weight: Tensor, *norms: Tensor) -> list[Tensor]:
        normed = F.rms_norm(x + added, weight.shape, weight, eps)
        (gate, up), heads = normed.chunk(2, -1), normed.view(3, 6, 16)
        turned = []
        for rows, norm in zip(heads[:, :5].split([4, 1], 1), norms, strict=True):
            first, second = F.rms_norm(rows, norm.shape, norm, eps).chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            turned.append(torch.cat([first * c - second * s, second * c + first * s], -1))
        return [x + added, F.silu(gate) * up, *turned, heads[:, 5:]]

    found, expected = (_with_gradients(made(*inputs), inputs) for made in (by_kernels, by_torch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _with_gradients(results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the results, and the gradients of the sum of their squares."""
    squares = torch.stack([x.square().sum() for x in results])
    return [*(x.detach() for x in results), *torch.autograd.grad(squares.sum(), inputs)]
