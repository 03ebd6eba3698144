"""Causal attention that does more with scores than kernels know, block by block of queries: of scores no more than a
block's are ever in memory, and backward computes them anew from what FlashAttention keeps (Dao 2023, arXiv:2307.08691,
section 3.1): queries, keys, values, what came of them, and the logarithm of each query's sum.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.attention import sees
from rltrain.models.flops import SCORES_AT_ONCE

LEAST_TOKENS = 16
"""Queries of every sequence in a block, however many sequences there are."""


def attend_blockwise(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block_tokens: int | None = None,
) -> Tensor:
    """queries [sequences, heads, n, head_dim], keys and values [sequences, kv_heads, n, ...] -> [sequences, heads, n,
    head_dim of values]. With `window` a token attends to so many, itself among them; with `softcap` scores x become
    softcap * tanh(x / softcap); `sinks` [heads] are one score more of each head, of nothing. Scores are multiplied by
    `scale`, or 1 / sqrt(head_dim); `block_tokens` queries are computed at a time, or as many as have SCORES_AT_ONCE."""
    scale = queries.size(-1) ** -0.5 if scale is None else scale
    if block_tokens is None:
        block_tokens = max(SCORES_AT_ONCE // (queries.shape[:3].numel() or 1), window or 0, LEAST_TOKENS)
    attended: Tensor = _Blockwise.apply(queries, keys, values, sinks, scale, window, softcap, block_tokens)
    return attended


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tokens: int,
    ) -> Tensor:
        attended = queries.new_empty(*queries.shape[:-1], values.size(-1))
        sums = queries.new_empty(queries.shape[:-1], dtype=_wide(queries))
        ctx.settings = scale, window, softcap, block_tokens
        for rows, columns in _blocks(queries.size(2), block_tokens, window):
            bent = _bent(queries[:, :, rows], keys[:, :, columns], scale, softcap)
            scores = _masked(bent, rows, columns, window)
            sums[:, :, rows] = scores.logsumexp(-1)
            if sinks is not None:
                sums[:, :, rows] = sums[:, :, rows].logaddexp(sinks.to(sums.dtype)[:, None])
            shares = (scores - sums[:, :, rows, None]).exp_().to(values.dtype)
            attended[:, :, rows] = (_by_group(shares, keys) @ values[:, :, columns]).view_as(attended[:, :, rows])
        ctx.save_for_backward(queries, keys, values, sinks, attended, sums)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, sinks, attended, sums = ctx.saved_tensors
        scale, window, softcap, block_tokens = ctx.settings
        given, wide = gradients[0], sums.dtype
        along = (given.to(wide) * attended.to(wide)).sum(-1)
        of_queries = torch.empty_like(queries)
        of_keys, of_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        for rows, columns in _blocks(queries.size(2), block_tokens, window):
            bent = _bent(queries[:, :, rows], keys[:, :, columns], scale, softcap)
            shares = (_masked(bent, rows, columns, window) - sums[:, :, rows, None]).exp_()
            rows_given = _by_group(given[:, :, rows], keys)
            of_shares = (rows_given @ values[:, :, columns].mT).view_as(shares).to(wide)
            of_scores = shares * (of_shares - along[:, :, rows, None])
            if softcap is not None:
                of_scores *= 1 - (bent / softcap).square()
            of_scores = _by_group(of_scores.mul_(scale).to(queries.dtype), keys)
            of_queries[:, :, rows] = (of_scores @ keys[:, :, columns]).view_as(queries[:, :, rows])
            of_keys[:, :, columns] += of_scores.mT @ _by_group(queries[:, :, rows], keys)
            of_values[:, :, columns] += _by_group(shares.to(values.dtype), keys).mT @ rows_given
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(wide)[:, None] - sums).exp() * along).sum((0, 2)).to(sinks.dtype)
        return of_queries, of_keys.to(keys.dtype), of_values.to(values.dtype), of_sinks, None, None, None, None


def _blocks(length: int, block_tokens: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that any of them attends to."""
    for first in range(0, length, block_tokens):
        last = min(first + block_tokens, length)
        yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _by_group(of_heads: Tensor, keys: Tensor) -> Tensor:
    """[sequences, heads, n, m] -> [sequences, kv_heads, heads of each * n, m]"""
    return of_heads.reshape(len(keys), keys.size(1), -1, of_heads.size(-1))


def _bent(queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores [sequences, heads, n, m], not yet masked, in fp32 or wider."""
    scores = (_by_group(queries, keys) @ keys.mT).to(_wide(queries)) * scale
    scores = scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
    return scores.view(*queries.shape[:-1], keys.size(2))


def _masked(scores: Tensor, rows: slice, columns: slice, window: int | None) -> Tensor:
    queries, keys = (torch.arange(part.start, part.stop, device=scores.device) for part in (rows, columns))
    return scores.masked_fill(~sees(queries, keys, window), -torch.inf)
