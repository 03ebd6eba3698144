"""Attention of transformers' models over packed sequences, in the place of its own.

transformers gives its layers every further argument of a model's call, and they give it to attention: so the sequences
arrive here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from rltrain.training.fsdp.heads import SpreadHeads
from rltrain.training.packed_attention import attend_rows

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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, ...] -> [1, rows, heads, head_dim of value].

    A token attends to those before it in its sequence, of which `sliding_window` leaves the last ones; where it is not
    among `arguments` transformers has it in the mask alone, by the attribute of `module`. `softcap` bends scores, and
    `s_aux` [heads] is one more score that nothing is taken from. Collective over: the context-parallel group.
    """
    window = arguments.get("sliding_window", getattr(module, "sliding_window", None))
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
        attended = attend_rows(*heads, sequences.whole, scale, window, softcap, sinks)
        return sequences.gathered(attended)[None], None
    return attend_rows(*rows, sequences, scale, window, softcap, s_aux)[None], None


def register() -> None:
    """Have transformers know it as NAME."""
    AttentionInterface.register(NAME, packed_attention)
