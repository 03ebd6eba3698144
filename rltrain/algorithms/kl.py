"""Monte-Carlo estimators of KL(actor || reference) from log-probs of tokens the actor drew.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with
r = reference probability / actor probability of the token:

    k1 = -log r                unbiased, high variance, may be negative
    k2 = (log r)^2 / 2         biased, low variance; its gradient is an unbiased estimate of the KL's gradient
    k3 = (r - 1) - log r       unbiased, low variance, never negative
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(actor_logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate, in the shape of the arguments; differentiable with respect to both."""
    log_ratio = reference_logprobs - actor_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio
