"""Monte-Carlo estimators of KL(actor || reference) from log-probs of tokens the actor drew.

J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html, with
r = reference probability / actor probability of the token:

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
    """Per-token estimate, in the shape of the arguments; differentiable with respect to both."""
    log_ratio = reference_logprobs - actor_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


# KL over the vocabulary, from the log-probs of several tokens in the place of each one.
#
# Whoever knows a distribution leaves its likeliest tokens and their log-probs in the experience, as `<role>_top_ids`
# and `<role>_top_logprobs` [tokens, k]; k is 0 where nobody asks. The model in training says what it thinks of the same
# tokens, all roles' beside each other.

TELLING = ("reference", "teacher")
"""Roles that may leave a distribution."""

MIN_REST = 1e-5
"""Probability of all other tokens together below which it is rounding."""


def asked_tokens(experience: Experience) -> Tensor | None:
    """[tokens, n] whose log-probs a loss wants in each token's place, beside that of the token; None where it wants
    none."""
    asked = [getattr(experience, f"{role}_top_ids") for role in _telling(experience)]
    return torch.cat(asked, dim=1) if asked else None


def divergence_from(role: str, experience: Experience, of_asked: Sequence[Tensor]) -> Tensor | None:
    """[tokens] KL(policy || role) on response tokens, 0 elsewhere; None where the role left no distribution.

    `of_asked` holds the policy's log-probs of `asked_tokens`, or nothing where there are none. Gradients flow to them.
    """
    both = told_of(role, experience, of_asked)
    return None if both is None else reverse_kl(*both)


def told_of(role: str, experience: Experience, of_asked: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """[tokens, k] log-probs of the role's likeliest tokens, the policy's and the role's, 0 outside the response; None
    where the role left no distribution. `of_asked` as in divergence_from."""
    telling = _telling(experience)
    if role not in telling:
        return None
    theirs = [getattr(experience, f"{other}_top_logprobs") for other in telling]
    mine = torch.split(of_asked[0], [logprobs.shape[1] for logprobs in theirs], dim=1)
    outside, number = ~experience.response_mask[:, None], telling.index(role)
    return mine[number].masked_fill(outside, 0), theirs[number].masked_fill(outside, 0)


def _telling(experience: Experience) -> list[str]:
    """The roles that left a distribution."""
    fields = [(role, f"{role}_top_ids") for role in TELLING]
    return [role for role, name in fields if experience.has(name) and getattr(experience, name).shape[1]]


def reverse_kl(policy: Tensor, other: Tensor) -> Tensor:
    """[tokens] sum of p (log p - log q) over k tokens and, as one more outcome, all the others.

    `policy` and `other` [tokens, k] are log-probs of the same k tokens of each token's vocabulary. Gradients flow to
    both. It is a lower bound of the KL over the whole vocabulary, and equal to it where the k tokens are all.
    """
    return forward_kl(other, policy)


def forward_kl(policy: Tensor, other: Tensor, *, rest: bool = True, min_logprob: float | None = None) -> Tensor:
    """[tokens] sum of q (log q - log p), q the other's: as `reverse_kl` with the two changed over.

    Without `rest` over the k tokens alone, at least 0. Log-probs below `min_logprob` count as it.
    """
    if min_logprob is not None:
        policy, other = policy.clamp(min=min_logprob), other.clamp(min=min_logprob)
    over_tokens = (other.exp() * (other - policy)).sum(1)
    if not rest:
        return over_tokens.clamp(min=0)
    its_rest = _rest(other)
    return over_tokens + its_rest * (its_rest.log() - _rest(policy).log())


def _rest(logprobs: Tensor) -> Tensor:
    """[tokens] probability of all other tokens together."""
    return torch.clamp(1 - logprobs.exp().sum(1), min=MIN_REST)


# The distance from a teacher: the reverse KL, KL(actor || teacher), as advantages or as a term of the loss, or there
# the forward KL, KL(teacher || actor).
#
# On samples that the actor draws it is what on-policy distillation minimizes (Agarwal et al. 2024, "On-Policy
# Distillation of Language Models").


def with_teacher_advantages(experience: Experience, coef: float, most: float | None = None) -> Experience:
    """Advantages, lowered by coef * (log p - log q) on response tokens, a distance of at most `most`.

    p is a drawn token's probability under the actor, q under the teacher. The mean of log p - log q over what the actor
    draws is the reverse KL of that token's distribution, and its policy gradient that of the reverse KL. Needs
    advantages and teacher_logprobs; the actor's log-probs are actor_logprobs where present, else rollout_logprobs.
    """
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    distance = (drawn - experience.teacher_logprobs).masked_fill(~experience.response_mask, 0)
    if most is not None:
        distance = distance.clamp(-most, most)
    return experience.with_fields(advantages=experience.advantages - coef * distance)


def teacher_distance(
    experience: Experience, logprobs: Tensor, of_asked: Sequence[Tensor], settings: schema.Teacher
) -> tuple[Tensor, Tensor]:
    """[tokens] the distance on response tokens, with a gradient, and what to report of it.

    Over the teacher's likeliest tokens where it left such. Else estimated from the drawn token, by k2, whose gradient
    is that of the reverse KL on average; k3, which has less variance, is what to report. Needs teacher_logprobs.
    """
    both = told_of("teacher", experience, of_asked)
    if both is not None:
        over_tokens = _over_tokens(*both, settings)
        return over_tokens, over_tokens.detach()
    drawn = logprobs.masked_fill(~experience.response_mask, 0), of_response(experience, "teacher_logprobs")
    return kl_estimate(*drawn, "k2"), kl_estimate(*drawn, "k3").detach()


def _over_tokens(policy: Tensor, teacher: Tensor, settings: schema.Teacher) -> Tensor:
    """[tokens] from log-probs [tokens, k] of the actor and the teacher."""
    if settings.kl == "forward":
        distance = forward_kl(policy, teacher, rest=settings.rest, min_logprob=settings.min_logprob)
    else:
        distance = reverse_kl(policy, teacher)
    return distance if settings.max_distance is None else distance.clamp(max=settings.max_distance)
