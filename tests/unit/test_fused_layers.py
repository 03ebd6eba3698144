"""Fused layers against their formulas, by gradient too, in fp64; and products by oneDNN against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.training.megatron import fused
from rltrain.training.megatron.attention import (
    PackedAttention,
    PositionRotaryEmbedding,
    ShortAttention,
    packed_sequences,
    rotation,
)
from rltrain.training.megatron.fused import (
    LEAST_ROWS,
    Product,
    RmsNorm,
    SwiGlu,
    TurnedHeads,
    rows_multiple,
    rows_product,
    takes_fused,
    takes_onednn,
)

CPU = torch.device("cpu")
EPS = 1e-5
GROUPS, PER_GROUP, HEAD_DIM = 2, 4, 6
"""Of a group's heads two are queries."""
LENGTHS = [3, 1, 5, 2]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def angles_of(lengths: list[int], rotated: int = HEAD_DIM) -> Tensor:
    frequencies = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)[: rotated // 2]
    return PositionRotaryEmbedding(frequencies)(packed_sequences(lengths, CPU).positions).double()


def turned_by_formula(heads: Tensor, weight: Tensor | None, angles: Tensor, magnitude: float = 1.0) -> Tensor:
    straight, values = heads[:, :, :-1], heads[:, :, -1:]
    normed = straight if weight is None else norm(straight, weight[:-1])
    first, second = normed[..., : angles.size(-1)].chunk(2, dim=-1)
    cos, sin = (magnitude * part.chunk(2, dim=-1)[0] for part in (angles.cos(), angles.sin()))
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    rotated = torch.cat([rotated, normed[..., angles.size(-1) :]], dim=-1)
    return torch.cat([rotated, values], dim=2)


def attention_by_torch(heads: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    query, key, value = (part.flatten(1, 2)[:, None] for part in heads.split([PER_GROUP - 2, 1, 1], dim=2))
    packed = packed_sequences(lengths, CPU)
    return PackedAttention(softmax_scale=None, window=window)(query, key, value, None, packed_seq_params=packed)


def attention_in_window(heads: Tensor, lengths: list[int], window: int) -> Tensor:
    """Token by token."""
    outputs = []
    for sequence in heads.split(lengths):
        for token in range(len(sequence)):
            seen = sequence[max(0, token - window + 1) : token + 1]
            keys, values = seen[:, :, -2], seen[:, :, -1]
            scores = torch.einsum("gqd,tgd->gqt", sequence[token, :, :-2], keys) * HEAD_DIM**-0.5
            outputs.append(torch.einsum("gqt,tgd->gqd", scores.softmax(-1), values).flatten())
    return torch.stack(outputs)[:, None]


def turned(heads: Tensor, weight: Tensor | None, rotated: int = HEAD_DIM, magnitude: float = 1.0) -> Tensor:
    angles = angles_of(LENGTHS, rotated)
    return TurnedHeads.apply(heads, weight, *rotation(angles, heads, magnitude), EPS, rotated)


def attended(heads: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    return ShortAttention.apply(heads, packed_sequences(lengths, CPU), HEAD_DIM**-0.5, window)


def head_weights() -> Tensor:
    """The values' are not looked at."""
    return numbers(PER_GROUP, HEAD_DIM)


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]


def cases() -> dict[str, Case]:
    """Function, formula, inputs."""
    torch.manual_seed(0)
    tokens, angles = sum(LENGTHS), angles_of(LENGTHS)
    heads = (tokens, GROUPS, PER_GROUP, HEAD_DIM)

    def silu_of_gate_times_up(x: Tensor) -> Tensor:
        return x[..., :4] * x[..., :4].sigmoid() * x[..., 4:]

    return {
        "norm": (lambda x, w: RmsNorm.apply(x, w, EPS), norm, (numbers(7, 1, 5), numbers(5))),
        "swiglu": (SwiGlu.apply, silu_of_gate_times_up, (numbers(5, 1, 8),)),
        "product": (Product.apply, lambda x, w: x @ w.T, (numbers(5, 2, 3), numbers(4, 3))),
        "rotated heads": (
            lambda x: turned(x, None),
            lambda x: turned_by_formula(x, None, angles),
            (numbers(*heads),),
        ),
        "normalised and rotated heads": (
            lambda x, w: turned(x, torch.cat([w, torch.ones_like(w[:1])])),
            lambda x, w: turned_by_formula(x, torch.cat([w, torch.ones_like(w[:1])]), angles),
            (numbers(*heads), numbers(PER_GROUP - 1, HEAD_DIM)),
        ),
        "heads rotated in part": (
            lambda x, w: turned(x, torch.cat([w, torch.ones_like(w[:1])]), 4, 1.3),
            lambda x, w: turned_by_formula(x, torch.cat([w, torch.ones_like(w[:1])]), angles_of(LENGTHS, 4), 1.3),
            (numbers(*heads), numbers(PER_GROUP - 1, HEAD_DIM)),
        ),
        "attention in a window": (
            lambda x: attended(x, LENGTHS, 2),
            lambda x: attention_in_window(x, LENGTHS, 2),
            (numbers(*heads),),
        ),
        "attention": (
            lambda x: attended(x, LENGTHS),
            lambda x: attention_by_torch(x, LENGTHS),
            (numbers(*heads),),
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_fused_layers_equal_their_formulas(name: str) -> None:
    function, formula, inputs = cases()[name]
    actual, expected = function(*inputs), formula(*inputs)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    for mine, wanted in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_gradients_are_those_of_small_differences(name: str) -> None:
    function, _, inputs = cases()[name]
    assert torch.autograd.gradcheck(function, inputs)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_short_attention_takes_sequences_of_any_lengths(lengths: list[int]) -> None:
    heads = torch.randn(sum(lengths), GROUPS, PER_GROUP, HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close(attended(heads, lengths), attention_by_torch(heads, lengths))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 10))
def test_windows_hold_in_both_attentions(lengths: list[int], window: int) -> None:
    heads = torch.randn(sum(lengths), GROUPS, PER_GROUP, HEAD_DIM, dtype=torch.float64)
    expected = attention_in_window(heads, lengths, window)
    torch.testing.assert_close(attended(heads, lengths, window), expected)
    torch.testing.assert_close(attention_by_torch(heads, lengths, window), expected)


def test_no_gradient_is_asked_for_where_weights_are_frozen() -> None:
    x, weight = numbers(5, 3), numbers(4, 3).detach()
    (gradient,) = torch.autograd.grad(Product.apply(x, weight).sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(5, 3))


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("onednn", [True, False])
def test_products_equal_those_of_double_precision(width: int, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "HAS_ONEDNN", onednn and fused.HAS_ONEDNN)
    torch.manual_seed(0)
    rows, matrix = (torch.randn(shape, requires_grad=True) for shape in [(LEAST_ROWS + 1, 16), (width, 16)])
    exact = rows.double() @ matrix.double().T
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    with torch.no_grad():
        torch.testing.assert_close(rows_product(rows, matrix), exact, **close)
    upstream = torch.randn(len(rows), width)
    gradients = torch.autograd.grad(Product.apply(rows, matrix), (rows, matrix), upstream)
    for mine, wanted in zip(gradients, torch.autograd.grad(exact, (rows, matrix), upstream.double()), strict=True):
        torch.testing.assert_close(mine, wanted, **close)


def test_only_full_precision_on_cpus_is_fused() -> None:
    many = torch.empty(LEAST_ROWS, 2)
    assert takes_fused(many) and takes_fused(many.double())
    assert not any(takes_fused(x) for x in (many.bfloat16(), many.to("meta")))
    assert not any(takes_onednn(x) for x in (many.bfloat16(), many.double(), many.to("meta"), many[1:]))
    assert rows_multiple(CPU, torch.bfloat16) == rows_multiple(torch.device("cuda"), torch.float32) == 1
