"""Monte-Carlo estimators of KL(actor || reference) from log-probs of tokens the actor drew, and KL as a reward penalty.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with
r = reference probability / actor probability of the token:

    k1 = -log r                unbiased, high variance, may be negative
    k2 = (log r)^2 / 2         biased, low variance; its gradient is an unbiased estimate of the KL's gradient
    k3 = (r - 1) - log r       unbiased, low variance, never negative
"""

from typing import Literal

import torch
from torch import Tensor

from rltrain.algorithms.losses import sample_index
from rltrain.config import schema
from rltrain.data.experience import Experience

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(actor_logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate, in the shape of the arguments; differentiable with respect to both."""
    log_ratio = reference_logprobs - actor_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def kl_penalty(experience: Experience, kl: schema.Kl) -> Tensor:
    """[tokens] -coef times the KL estimate of response tokens, 0 elsewhere: a reward per token.

    Needs reference_logprobs; the actor's own log-probs are actor_logprobs where present, else rollout_logprobs.
    """
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    assert kl.estimator != "full", "it is no estimate of a drawn token"
    estimate = kl_estimate(drawn, experience.reference_logprobs, kl.estimator)
    return -kl.coef * estimate.masked_fill(~experience.response_mask, 0)


def apply_kl_to_rewards(experience: Experience, kl: schema.Kl) -> Experience:
    """Rewards with the KL penalty of the whole response added, to be called before group-relative advantages.

    With one advantage per sample, a penalty on every token and its sum on the sample are the same. Needs rewards, and
    what kl_penalty needs.
    """
    penalty = kl_penalty(experience, kl)
    return experience.with_fields(rewards=experience.rewards.index_add(0, sample_index(experience), penalty))
