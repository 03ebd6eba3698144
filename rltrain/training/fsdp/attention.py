"""Attention of transformers' models over packed sequences, in the place of its own.

transformers gives its layers every further argument of a model's call, and they give it to attention: so the sequences
arrive here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from rltrain.models.attention import attend
from rltrain.training.fsdp.heads import SpreadHeads
from rltrain.training.packed_attention import PackedRows, attend_rows

NAME = "rltrain_packed"
SEQUENCES = "rltrain_sequences"
"""The argument by which a model's call passes the sequences."""


class Rows(NamedTuple):
    """[tokens, heads, ...] each"""

    query: Tensor
    key: Tensor
    value: Tensor


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, ...] -> [1, rows, heads, head_dim of value].

    A token attends to those before it in its sequence, of which `sliding_window` leaves the last ones; `softcap` bends
    scores, and `s_aux` [heads] is one more score that nothing is taken from. Collective over: the context-parallel
    group.
    """
    sequences = arguments.get(SEQUENCES)
    if sequences is None:
        raise RuntimeError(
            f"{type(module).__name__} of transformers does not pass on what its model is called with, so that it could "
            "not tell packed sequences apart: actor.backend fsdp cannot train it"
        )
    rows = Rows(*(x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)))
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    if isinstance(sequences, SpreadHeads):
        heads = Rows(*sequences.scattered(rows))
        sinks = None if s_aux is None else sequences.own_heads(s_aux)
        attended = _attend(heads, sequences.whole, scale, sliding_window, softcap, sinks)
        return sequences.gathered(attended)[None], None
    return _attend(rows, sequences, scale, sliding_window, softcap, s_aux)[None], None


def register() -> None:
    """Have transformers know it as NAME."""
    AttentionInterface.register(NAME, packed_attention)


def _attend(
    rows: Rows,
    packed: PackedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[tokens, heads, head_dim of value]"""
    if window is not None and window >= packed.longest:
        window = None
    if window is None and softcap is None and sinks is None:
        return attend_rows(*rows, packed, scale)
    bounds = packed.boundaries.tolist()
    spans = [slice(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    of_each = [_attend_one(Rows(*(x[span] for x in rows)), scale, window, softcap, sinks) for span in spans]
    return torch.cat(of_each)


def _attend_one(
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Of one sequence, with all its scores in memory where torch's kernels do not know what is asked for."""
    length = len(rows.query)
    place = torch.arange(length, device=rows.query.device)
    distance = place[:, None] - place
    sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1) for x in rows)
    if softcap is None and sinks is None:
        return attend(q, k, v, sees, scale=scale).transpose(0, 1)
    copies = q.size(0) // k.size(0)
    k, v = (x.repeat_interleave(copies, dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, length, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :length].to(v.dtype)
    return (weights @ v).transpose(0, 1)
