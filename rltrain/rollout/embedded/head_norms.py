"""Norms of queries and keys: head by head, or of all heads of a token at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters

HeadNorms = Callable[[Tensor], Tensor]
"""Of this rank's query heads with its key heads behind them [tokens, heads, head_dim]. Rounded once, as the trainer's.

Collective over: the engine's tensor-parallel group."""


def head_norms(parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> HeadNorms | None:
    """Those of a layer; None where it has none."""
    weights = parameters.get("self_attn.q_norm.weight"), parameters.get("self_attn.k_norm.weight")
    if weights[0] is None or weights[1] is None:
        return None
    if architecture.norms_projections:
        return _OfProjections(weights[0], weights[1], architecture, group)
    return _OfHeads(weights[0], weights[1], architecture, group)


class _OfHeads:
    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self._queries, self._keys = queries, keys
        self._num_queries = architecture.num_heads // group.size
        self._eps, self._offset = architecture.norm_eps, architecture.norm_offset

    def __call__(self, heads: Tensor) -> Tensor:
        wide = F.rms_norm(heads.float(), heads.shape[-1:], None, self._eps)
        wide[:, : self._num_queries].mul_(self._queries + self._offset)
        wide[:, self._num_queries :].mul_(self._keys + self._offset)
        return wide.to(heads.dtype)


class _OfProjections:
    """Weights are whole on every rank; several ranks may have the same key head."""

    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._eps, self._weights = group, architecture.norm_eps, (queries, keys)
        totals = architecture.num_heads, architecture.num_kv_heads
        self._firsts = [group.rank * total // group.size * architecture.head_dim for total in totals]
        self._counts = [max(1, total // group.size) for total in totals]

    def __call__(self, heads: Tensor) -> Tensor:
        parts = [part.flatten(1).float() for part in heads.split(self._counts, 1)]
        means = self._group.all_reduce(torch.stack([part.square().mean(1) for part in parts])) / self._group.size
        normed = []
        for part, mean, weight, first in zip(parts, means, self._weights, self._firsts, strict=True):
            gain = weight[first : first + part.shape[1]]
            normed.append(part * torch.rsqrt(mean + self._eps)[:, None] * gain)
        return torch.cat(normed, 1).view(heads.shape).to(heads.dtype)
