"""Caching the contexts of samples that start, all but their last tokens."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rltrain.rollout.embedded.kv_cache import Entered, Head, KvCache, Suffix
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.workspace import PASS_TOKENS

_PASS_SCORES = 1 << 22
"""Pairs of a padded token and a position that it may attend to, in one pass over suffixes; bounds what one head takes
for its scores."""


def fill_cache(model: EngineModel, cache: KvCache, entered: Entered, device: torch.device) -> None:
    """Compute what has `entered` the cache, each distinct head once.

    Collective over: the engine's tensor-parallel group.
    """
    for heads in head_passes(entered.heads):
        lengths = [len(head) for head in heads]
        width = lengths[-1]
        positions = torch.arange(width, device=device).repeat(len(heads))
        attention = cache.prefill_attention([entered.heads[head] for head in heads], lengths, width)
        model.fill_cache(_padded(heads, width, device), positions, attention)
    for suffixes in suffix_passes(entered.suffixes):
        width = max(len(suffix.tokens) for suffix in suffixes)
        spans = torch.tensor([(suffix.first, suffix.end - 1) for suffix in suffixes], device=device)
        positions = torch.minimum(spans[:, :1] + torch.arange(width, device=device), spans[:, 1:])
        attention = cache.suffix_attention(suffixes, width)
        model.fill_cache(_padded([suffix.tokens for suffix in suffixes], width, device), positions.view(-1), attention)


def head_passes(heads: Iterable[Head]) -> list[list[Head]]:
    """Those of `heads` that have tokens, from short to long, in parts that fit one pass each."""
    passes: list[list[Head]] = []
    for head in sorted((head for head in heads if head), key=len):
        if passes and (len(passes[-1]) + 1) * len(head) <= PASS_TOKENS:
            passes[-1].append(head)
        else:
            passes.append([head])
    return passes


def suffix_passes(suffixes: Iterable[Suffix]) -> list[list[Suffix]]:
    """Those of `suffixes` that have tokens, from short to long, in parts that fit one pass each; one that fits none is
    cut into pieces, each computed before the next."""
    passes: list[list[Suffix]] = []
    ordered = sorted((suffix for suffix in suffixes if suffix.tokens), key=lambda suffix: len(suffix.tokens))
    for piece in (piece for suffix in ordered for piece in _pieces(suffix)):
        if passes and passes[-1][-1].slot != piece.slot and _fits_one_pass([*passes[-1], piece]):
            passes[-1].append(piece)
        else:
            passes.append([piece])
    return passes


def _pieces(suffix: Suffix) -> Iterator[Suffix]:
    size = max(1, min(PASS_TOKENS, _PASS_SCORES // suffix.end))
    for start in range(0, len(suffix.tokens), size):
        yield Suffix(suffix.slot, suffix.first + start, suffix.tokens[start : start + size])


def _fits_one_pass(suffixes: Sequence[Suffix]) -> bool:
    num_tokens = len(suffixes) * max(len(suffix.tokens) for suffix in suffixes)
    return num_tokens <= PASS_TOKENS and num_tokens * max(suffix.end for suffix in suffixes) <= _PASS_SCORES


def _padded(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    """[rows * width]"""
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(-1)
