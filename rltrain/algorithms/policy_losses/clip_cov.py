"""Clip-Cov: PPO's clip, and no gradient from a few of the tokens whose update costs the most entropy."""

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.clip import clip
from rltrain.algorithms.policy_losses.covariance import covariances, number_chosen
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def clip_cov(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """PPO's clipped loss, 0 for the tokens that `drawn_tokens` gives.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. Of the
    micro-batch, as in their implementation.
    """
    clipped = clip(tokens, settings)
    chosen = drawn_tokens(tokens, settings.clip_cov, clipped.shares["pg_clipfrac"])
    return Surrogate(clipped.per_token.masked_fill(chosen, 0), {**clipped.shares, "covariance_tokens": chosen})


def drawn_tokens(tokens: ResponseTokens, settings: schema.ClipCov, clip_binds: Tensor) -> Tensor:
    """[tokens] bool: a share `ratio` of the response tokens, drawn from those with a covariance between low and high
    that the clip lets through."""
    covariance = covariances(tokens)
    within = (covariance > settings.low) & (covariance < settings.high) & tokens.mask & ~clip_binds
    candidates = torch.nonzero(within).flatten()
    # The same draw on every tensor-parallel rank, and in a run that is repeated.
    generator = torch.Generator().manual_seed(len(candidates))
    order = torch.randperm(len(candidates), generator=generator)[: number_chosen(tokens, settings.ratio)]
    chosen = torch.zeros_like(tokens.mask)
    chosen[candidates[order.to(candidates.device)]] = True
    return chosen
