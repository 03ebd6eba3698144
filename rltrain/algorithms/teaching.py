"""The distance from a teacher: the reverse KL, KL(actor || teacher), as advantages or as a term of the loss, or there
the forward KL, KL(teacher || actor).

On samples that the actor draws it is what on-policy distillation minimizes (Agarwal et al. 2024, "On-Policy
Distillation of Language Models").
"""

from collections.abc import Sequence

from torch import Tensor

from rltrain.algorithms.divergence import forward_kl, reverse_kl, told_of
from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import of_response
from rltrain.config import schema
from rltrain.data.experience import Experience


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
