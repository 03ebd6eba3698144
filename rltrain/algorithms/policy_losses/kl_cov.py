"""KL-Cov: no clip, and a penalty on the few tokens whose update costs the most entropy."""

import torch
from torch import Tensor

from rltrain.algorithms.policy_losses.covariance import covariances, number_chosen
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def kl_cov(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-r A, and for the tokens of `largest_covariances` coef |log r| more.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. Of the
    micro-batch, and with |log r| for the divergence from the old policy, as in their implementation.
    """
    chosen = largest_covariances(tokens, settings.kl_cov.ratio)
    distance = (tokens.logprobs - tokens.old_logprobs).abs().masked_fill(~chosen, 0)
    per_token = -tokens.ratio * tokens.advantages + settings.kl_cov.coef * distance
    return Surrogate(per_token, {"covariance_tokens": chosen})


def largest_covariances(tokens: ResponseTokens, ratio: float) -> Tensor:
    """[tokens] bool: the share `ratio` of the response tokens with the largest covariance."""
    covariance = covariances(tokens).masked_fill(~tokens.mask, -torch.inf)
    order = torch.argsort(covariance, descending=True, stable=True)[: number_chosen(tokens, ratio)]
    chosen = torch.zeros_like(tokens.mask)
    chosen[order] = True
    return chosen & tokens.mask
