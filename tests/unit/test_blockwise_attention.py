"""Attention in blocks of queries against all scores at once, with what torch makes of them backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models import attention
from rltrain.models.attention import attend, sees
from rltrain.training import packed_attention
from rltrain.training.packed_attention import attend_blockwise


def at_once(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """By the formula."""
    group = queries.size(1) // keys.size(1)
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = queries @ keys.mT / queries.size(-1) ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(queries.size(2))
    scores = scores.masked_fill(~sees(places, places, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : queries.size(2)] @ values


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    st.integers(1, 17),
    st.none() | st.integers(1, 20),
    st.none() | st.just(0.7),
    st.booleans(),
    st.integers(1, 20),
)
def test_blocks_change_nothing(
    sequences: int,
    heads: tuple[int, int],
    length: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    block_tokens: int,
) -> None:
    torch.manual_seed(0)
    sizes = [(heads[0], 5), (heads[1], 5), (heads[1], 3)]
    inputs = [
        torch.randn(sequences, count, length, size, dtype=torch.float64, requires_grad=True) for count, size in sizes
    ]
    sinks = torch.randn(heads[0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    learned = [*inputs, *([sinks] if sinks is not None else [])]
    expected = at_once(*inputs, window, softcap, sinks)
    found = attend_blockwise(*inputs, window=window, softcap=softcap, sinks=sinks, block_tokens=block_tokens)
    torch.testing.assert_close(found, expected)
    given_back = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, learned, given_back), torch.autograd.grad(expected, learned, given_back), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    if softcap is None and window is None and sinks is not None:
        of_engines = attend(*inputs, causal=True, sinks=sinks[:, None, None])
        torch.testing.assert_close(of_engines.float(), expected.float())  # it has its scores in float32


def test_half_precision_keeps_its_type() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 33, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    found = attend_blockwise(*inputs, sinks=sinks, window=9, block_tokens=8)
    gradients = torch.autograd.grad(found.float().square().sum(), [*inputs, sinks])
    assert all(x.dtype == torch.bfloat16 for x in (found, *gradients))
    wide = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    expected = at_once(*wide[:3], 9, None, wide[3])
    torch.testing.assert_close(found.double(), expected, rtol=4e-2, atol=4e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.1, atol=0.1)


def test_blocks_are_as_many_queries_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    blocks = packed_attention._blocks

    def noted(length: int, block_tokens: int, window: int | None) -> object:
        asked.append(block_tokens)
        return blocks(length, block_tokens, window)

    monkeypatch.setattr(packed_attention, "_blocks", noted)
    monkeypatch.setattr(packed_attention, "SCORES_AT_ONCE", 2 * 3 * 40 * 20)
    rows = torch.randn(2, 3, 40, 4)
    for window in (None, 30, 9):
        attend_blockwise(rows, rows, rows, window=window, softcap=1.0)
    attend_blockwise(*[rows.expand(2, 3, 40, 4).repeat(9, 1, 1, 1)] * 3, softcap=1.0)
    assert asked == [20, 30, 20, packed_attention.LEAST_TOKENS]


@pytest.mark.parametrize("per_row", [True, False])
def test_engines_attend_to_so_many_scores_at_once(per_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 7, 5), torch.randn(2, 2, 9, 5), torch.randn(2, 2, 9, 3)
    bias = torch.zeros(2, 1, 7 if per_row else 1, 9).masked_fill_(torch.rand(2, 1, 7 if per_row else 1, 9) < 0.4, -1e9)
    sinks = torch.randn(4, 7 if per_row else 1, 1)
    expected = attend(queries, keys, values, bias, softcap=2.0, sinks=sinks)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 2 * 4 * 9 * 3)
    torch.testing.assert_close(attend(queries, keys, values, bias, softcap=2.0, sinks=sinks), expected)
