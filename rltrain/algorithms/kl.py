"""Estimators of KL(actor || reference) from the log-probs of sampled tokens, and KL over the vocabulary.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with r = reference probability
/ actor probability of the token:

    k1 = -log r                unbiased, high variance, may be negative
    k2 = (log r)^2 / 2         biased, low variance; its gradient is an unbiased estimate of the KL's gradient
    k3 = (r - 1) - log r       unbiased, low variance, never negative
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rltrain.algorithms.losses import of_response
from rltrain.config import schema
from rltrain.data.experience import Experience

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(actor_logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Returns the estimate per token, in the shape of the arguments. It is differentiable with respect to both."""
    log_ratio = reference_logprobs - actor_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


# KL over the vocabulary, from the log-probs of several candidate tokens at each position.
#
# A reference or teacher stores its likeliest tokens and their log-probs in the experience, as `<role>_top_ids` and
# `<role>_top_logprobs` [tokens, k]. k is 0 if no loss needs them. The trained model computes its log-probs of the same
# tokens, for all roles side by side.

TELLING = ("reference", "teacher")
"""Roles that may leave a distribution in the experience."""

MIN_REST = 1e-5
"""Lower bound for the probability of all other tokens together. Smaller values are rounding errors."""


def asked_tokens(experience: Experience) -> Tensor | None:
    """Returns the candidate tokens of all roles, [tokens, n], or None if there are none.

    The model must return their log-probs in addition to the log-prob of the token itself.
    """
    asked = [getattr(experience, f"{role}_top_ids") for role in _roles_with_distribution(experience)]
    return torch.cat(asked, dim=1) if asked else None


def divergence_from(role: str, experience: Experience, of_asked: Sequence[Tensor]) -> Tensor | None:
    """Returns KL(policy || role) on response tokens and 0 elsewhere, [tokens], or None without a distribution of the
    role.

    `of_asked` contains the policy's log-probs of `asked_tokens`. It is empty if there are none. Gradients flow to it.
    """
    both = told_of(role, experience, of_asked)
    return None if both is None else reverse_kl(*both)


def told_of(role: str, experience: Experience, of_asked: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Returns log-probs of the role's likeliest tokens under the policy and under the role, [tokens, k] each.

    They are 0 outside the response. Returns None if the role left no distribution. `of_asked` is that of
    `divergence_from`.
    """
    roles = _roles_with_distribution(experience)
    if role not in roles:
        return None
    theirs = [getattr(experience, f"{other}_top_logprobs") for other in roles]
    mine = torch.split(of_asked[0], [logprobs.shape[1] for logprobs in theirs], dim=1)
    outside, number = ~experience.response_mask[:, None], roles.index(role)
    return mine[number].masked_fill(outside, 0), theirs[number].masked_fill(outside, 0)


def _roles_with_distribution(experience: Experience) -> list[str]:
    """Returns the roles that left a distribution in the experience."""
    fields = [(role, f"{role}_top_ids") for role in TELLING]
    return [role for role, name in fields if experience.has(name) and getattr(experience, name).shape[1]]


def reverse_kl(policy: Tensor, other: Tensor) -> Tensor:
    """Returns the sum of p (log p - log q) over k tokens and one more outcome, all other tokens, shape [tokens].

    `policy` and `other` [tokens, k] are log-probs of the same k tokens per position. Gradients flow to both. The result
    is a lower bound of the KL over the whole vocabulary. It is exact if the k tokens are the whole vocabulary.
    """
    return forward_kl(other, policy)


def forward_kl(policy: Tensor, other: Tensor, *, rest: bool = True, min_logprob: float | None = None) -> Tensor:
    """Returns the sum of q (log q - log p) with q of `other`, [tokens]: `reverse_kl` with exchanged arguments.

    Without `rest` the sum is over the k tokens alone and at least 0. Log-probs are raised to `min_logprob`.
    """
    if min_logprob is not None:
        policy, other = policy.clamp(min=min_logprob), other.clamp(min=min_logprob)
    over_tokens = (other.exp() * (other - policy)).sum(1)
    if not rest:
        return over_tokens.clamp(min=0)
    its_rest = _rest(other)
    return over_tokens + its_rest * (its_rest.log() - _rest(policy).log())


def _rest(logprobs: Tensor) -> Tensor:
    """Returns the probability of all other tokens together, [tokens]."""
    return torch.clamp(1 - logprobs.exp().sum(1), min=MIN_REST)


# The distance from a teacher. The reverse KL, KL(actor || teacher), serves as advantage or loss term. The forward KL,
# KL(teacher || actor), serves as loss term.
#
# On the actor's own samples the reverse KL is the objective of on-policy distillation (Agarwal et al. 2024, "On-Policy
# Distillation of Language Models").


def with_teacher_advantages(experience: Experience, coef: float, most: float | None = None) -> Experience:
    """Subtracts coef * (log p - log q) from the advantages of response tokens, with the distance limited to +-`most`.

    p is the sampled token's probability under the actor, q under the teacher. The mean of log p - log q over the
    actor's samples is the reverse KL, and its policy gradient is the gradient of the reverse KL.

    Needs advantages and teacher_logprobs. The actor's log-probs are actor_logprobs if present, else rollout_logprobs.
    """
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    distance = (drawn - experience.teacher_logprobs).masked_fill(~experience.response_mask, 0)
    if most is not None:
        distance = distance.clamp(-most, most)
    return experience.with_fields(advantages=experience.advantages - coef * distance)


def teacher_distance(
    experience: Experience, logprobs: Tensor, of_asked: Sequence[Tensor], settings: schema.Teacher
) -> tuple[Tensor, Tensor]:
    """Returns the distance on response tokens with a gradient, and the distance to report, [tokens] each.

    It is computed over the teacher's likeliest tokens if the experience has them. Otherwise it is estimated from the
    sampled token. The loss uses k2, because its gradient is that of the reverse KL on average. The report uses k3,
    because of its low variance. Needs teacher_logprobs.
    """
    both = told_of("teacher", experience, of_asked)
    if both is not None:
        over_tokens = _over_tokens(*both, settings)
        return over_tokens, over_tokens.detach()
    drawn = logprobs.masked_fill(~experience.response_mask, 0), of_response(experience, "teacher_logprobs")
    return kl_estimate(*drawn, "k2"), kl_estimate(*drawn, "k3").detach()


def _over_tokens(policy: Tensor, teacher: Tensor, settings: schema.Teacher) -> Tensor:
    """Returns the distance [tokens] from log-probs [tokens, k] of actor and teacher."""
    if settings.kl == "forward":
        distance = forward_kl(policy, teacher, rest=settings.rest, min_logprob=settings.min_logprob)
    else:
        distance = reverse_kl(policy, teacher)
    return distance if settings.max_distance is None else distance.clamp(max=settings.max_distance)
