"""Which experts a token visits, and with what weight, as the models in transformers choose them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models.architecture import MoE

_GROUP_SCORE_EXPERTS = 2
"""A group of experts is ranked by the sum of its best ones."""
_LEAST_SUM = 1e-20


class Routing(NamedTuple):
    """Of each token its experts [tokens, top_k] int64 and their weights [tokens, top_k] float32."""

    experts: Tensor
    weights: Tensor


def route(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, moe: MoE, *, logit_bias: Tensor | None = None
) -> Routing:
    """The experts of `hidden` [tokens, hidden], by the router's `weight` [experts, hidden], the `bias` [experts] that
    only chooses, and that of all it says. All in float32, whatever the model's type: close scores decide between
    experts."""
    logits = F.linear(hidden.float(), weight.float(), None if logit_bias is None else logit_bias.float())
    scores = torch.softmax(logits, -1) if moe.score == "softmax" else logits.sigmoid()
    choosing = scores if bias is None else scores + bias
    if moe.top_groups < moe.num_groups:
        choosing = _within_groups(choosing, moe)
    experts = choosing.topk(moe.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if moe.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return Routing(experts, weights if moe.scaling == 1 else weights * moe.scaling)


def _within_groups(choosing: Tensor, moe: MoE) -> Tensor:
    """`choosing`, -inf for experts outside of each token's best groups."""
    by_group = choosing.unflatten(-1, (moe.num_groups, -1))
    best = by_group.topk(_GROUP_SCORE_EXPERTS, -1).values.sum(-1).topk(moe.top_groups, -1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(-2)
