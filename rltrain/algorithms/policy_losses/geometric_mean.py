"""Geometric-mean policy optimization: a sequence counts by the geometric mean of its tokens' clipped ratios."""

import torch

from rltrain.algorithms.losses import sample_means
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def geometric_mean(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-A exp(mean over the sequence of l_t) at every token of a sequence, with l = min(log r, high) where its advantage
    A is positive, and max(log r, -low) where it is negative: the bounds are of log-ratios.

    Zhao et al. 2025, "Geometric-Mean Policy Optimization", whose bounds e^-0.4 and e^0.4 are clip_low =
    clip_high = 0.4. A is the mean of a sequence's advantages. Under normalization sequence_mean value and gradient are
    those of a mean over sequences.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    held = torch.where(positive, log_ratio.clamp(max=settings.clip_high), log_ratio)
    held = torch.where(negative, log_ratio.clamp(min=-settings.clip_low), held)
    ratio = sample_means(tokens.experience, held).exp()
    advantage = sample_means(tokens.experience, tokens.advantages)
    return Surrogate(-ratio * advantage, {"pg_clipfrac": held != log_ratio})
