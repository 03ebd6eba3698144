"""Divergence proximal policy optimization: how far a token's distribution moved says when it stops teaching."""

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema

PROBABILITY_EPS = 1e-8
"""Beside the probability of all other tokens, which may be 0."""


def dppo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-sg[min(r, c)] A log pi, and 0 where the token's probability has gone further than a bound in the direction in
    which A moves it; sg stops gradients, c is settings.dppo.ratio_max.

    Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, equations 13 and 14:
    the distance is that of two outcomes, the token and all others; clip_low is its bound for A < 0, clip_high for
    A > 0.
    """
    present, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    distance = (present - old).abs() if settings.dppo.divergence == "tv" else binary_kl(old, present)
    rose, fell = tokens.advantages > 0, tokens.advantages < 0
    stopped = rose & (present > old) & (distance > settings.clip_high)
    stopped |= fell & (present < old) & (distance > settings.clip_low)
    ratio, bound = tokens.ratio.detach(), settings.dppo.ratio_max
    weight = ratio if bound is None else ratio.clamp(max=bound)
    per_token = (-weight * tokens.advantages * tokens.logprobs).masked_fill(stopped, 0)
    return Surrogate(per_token, {"pg_clipfrac": stopped})


def binary_kl(old: Tensor, present: Tensor) -> Tensor:
    """[tokens] KL(old || present) of a token of these probabilities and all others as one outcome."""
    others = torch.log((1 - old + PROBABILITY_EPS) / (1 - present + PROBABILITY_EPS))
    return old * (old.log() - present.log()) + (1 - old) * others
