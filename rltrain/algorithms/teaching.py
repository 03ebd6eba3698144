"""The distance from a teacher, as advantages or in the loss: the reverse KL, KL(actor || teacher).

On samples that the actor draws it is what on-policy distillation minimizes (Agarwal et al. 2024, "On-Policy
Distillation of Language Models").
"""

from dataclasses import replace

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import LossFunction, LossOutput, Normalization, masked_sum, of_response, token_weights
from rltrain.config import schema
from rltrain.data.experience import Experience

MIN_REST = 1e-5
"""Probability of all other tokens together below which it is rounding."""


def with_teacher_advantages(experience: Experience, coef: float) -> Experience:
    """Advantages, lowered by coef * (log p - log q) on response tokens.

    p is a drawn token's probability under the actor, q under the teacher. The mean of log p - log q over what the actor
    draws is the reverse KL of that token's distribution, and its policy gradient that of the reverse KL. Needs
    advantages and teacher_logprobs; the actor's log-probs are actor_logprobs where present, else rollout_logprobs.
    """
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    distance = (drawn - experience.teacher_logprobs).masked_fill(~experience.response_mask, 0)
    return experience.with_fields(advantages=experience.advantages - coef * distance)


def reverse_kl(actor: Tensor, other: Tensor) -> Tensor:
    """[tokens] sum of p (log p - log q) over k tokens and, as one more outcome, all the others.

    `actor` and `other` [tokens, k] are log-probs of the same k tokens of each token's vocabulary. Gradients flow to
    both. It is a lower bound of the KL over the whole vocabulary, and equal to it where the k tokens are all.
    """
    over_tokens = (actor.exp() * (actor - other)).sum(1)
    rest, its_rest = (torch.clamp(1 - logprobs.exp().sum(1), min=MIN_REST) for logprobs in (actor, other))
    return over_tokens + rest * (rest.log() - its_rest.log())


def teaching_loss(
    inner: LossFunction, settings: schema.Teacher, normalization: Normalization, max_response_tokens: int
) -> LossFunction:
    """`inner`, a policy's loss function, and the distance from the teacher beside it.

    Needs teacher_logprobs, or else is `inner`; with teacher.top_k also teacher_top_ids, whose log-probs [tokens, k]
    under the actor come behind `inner`'s arguments, and teacher_top_logprobs.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor, *of_others: Tensor) -> LossOutput:
        output = inner(experience, logprobs, entropy)
        if not experience.has("teacher_logprobs"):
            return output
        mask = experience.response_mask
        if of_others:
            top = experience.teacher_top_logprobs
            distance = told = reverse_kl(*(values.masked_fill(~mask[:, None], 0) for values in (of_others[0], top)))
        else:
            drawn = logprobs.masked_fill(~mask, 0), of_response(experience, "teacher_logprobs")
            distance, told = kl_estimate(*drawn, "k2"), kl_estimate(*drawn, "k3")
        token_sums = {**output.token_sums, "teacher_kl": masked_sum(told.detach(), mask.float())}
        if settings.where == "advantage":
            return replace(output, token_sums=token_sums)
        weights = token_weights(experience, normalization, max_response_tokens)
        term = masked_sum(distance, weights.factor)
        sums = {**output.sums, "teacher_loss": term.detach()}
        return replace(output, loss=output.loss + settings.coef * term, sums=sums, token_sums=token_sums)

    return loss_function
