"""The loss of a policy that learns from what it drew: a surrogate of the ratio, corrected for who drew the tokens, with
an entropy bonus and a KL term where configured. Algorithms differ in where the advantages come from."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rltrain.algorithms.correction import corrected
from rltrain.algorithms.divergence import divergence_from
from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import (
    LossFunction,
    LossOutput,
    SharedLoss,
    divisor_shares,
    masked_max,
    masked_sum,
    of_response,
    token_weights,
)
from rltrain.algorithms.policy_losses.registry import policy_loss_of
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens
from rltrain.algorithms.teaching import teacher_distance
from rltrain.config import schema
from rltrain.data.experience import Experience


def policy_loss(settings: schema.Loss, max_response_tokens: int, teacher: schema.Teacher | None = None) -> LossFunction:
    """The policy's loss function of one job. `max_response_tokens` is a divisor under normalization dr_grpo.

    The micro-batch needs advantages, actor_logprobs if settings.old_logprobs is "actor", and reference_logprobs if
    the loss holds a KL term. Where it has teacher_logprobs the distance from the `teacher` is reported and, if that
    says so, part of the loss. `correction.summarize` turns its metrics into reported ones.
    """
    surrogate_of, old = policy_loss_of(settings), f"{settings.old_logprobs}_logprobs"

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor, *of_asked: Tensor) -> LossOutput:
        correction = corrected(experience, logprobs, settings)
        tokens = ResponseTokens.of(correction.experience, logprobs, old)
        surrogate = surrogate_of(tokens, settings)
        per_token = surrogate.per_token
        if correction.weights is not None:
            per_token = per_token.masked_fill(correction.weights == 0, 0) * correction.weights
        weights = token_weights(correction.experience, settings.normalization, max_response_tokens)
        loss = masked_sum(per_token, weights.factor) if surrogate.total is None else surrogate.total
        sums = {"pg_loss": loss}
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * masked_sum(entropy, weights.factor)
        if settings.kl.coef and settings.kl.where == "loss":
            sums["kl_loss"] = masked_sum(kl_term(tokens, settings.kl, of_asked), weights.factor)
            loss = loss + settings.kl.coef * sums["kl_loss"]
        token_means, maxima = _metrics(experience, logprobs.detach(), old)
        if teacher and experience.has("teacher_logprobs"):
            distance, token_means["teacher_kl"] = teacher_distance(experience, logprobs, of_asked, teacher)
            if teacher.where == "loss":
                sums["teacher_loss"] = masked_sum(distance, weights.factor)
                loss = loss + teacher.coef * sums["teacher_loss"]
        token_means |= {"entropy": entropy, **surrogate.shares, **correction.token_means}
        ones = experience.response_mask.float()
        return LossOutput(
            loss=loss,
            divisor=weights.divisor,
            sums={name: value.detach() for name, value in sums.items()},
            token_sums={name: masked_sum(values.detach(), ones) for name, values in token_means.items()},
            maxima={"ratio_max": masked_max(tokens.ratio, tokens.mask), **maxima},
        )

    return SharedLoss(
        loss_function,
        partial(divisor_shares, normalization=settings.normalization, max_response_tokens=max_response_tokens),
    )


def kl_term(tokens: ResponseTokens, settings: schema.Kl, of_asked: Sequence[Tensor] = ()) -> Tensor:
    """[tokens] KL(policy || reference) over the vocabulary where the reference left its distribution, else its estimate
    from the drawn token.

    An estimate is times the ratio by default (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1). The mean over tokens
    that the old policy drew is then the KL, and its gradient is the KL's. Of the estimators alone only k2 has the KL's
    gradient, and only where the old policy is the present one."""
    if settings.estimator == "full":
        over_vocabulary = divergence_from("reference", tokens.experience, of_asked)
        assert over_vocabulary is not None, "the reference leaves its distribution with estimator full"
        return over_vocabulary
    estimate = kl_estimate(tokens.logprobs, of_response(tokens.experience, "reference_logprobs"), settings.estimator)
    return tokens.ratio * estimate if settings.is_weighed else estimate


def _metrics(experience: Experience, logprobs: Tensor, old: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """[tokens] to be averaged, and maxima: how far the present weights are from the others, of all response tokens."""
    current = logprobs.masked_fill(~experience.response_mask, 0)
    difference = (current - of_response(experience, "rollout_logprobs")).abs()
    token_means = {"ppo_kl": of_response(experience, old) - current, "train_rollout_logprob_abs_diff": difference}
    if experience.has("reference_logprobs"):
        reference = of_response(experience, "reference_logprobs")
        token_means["reference_kl"] = kl_estimate(current, reference, "k3")
    return token_means, {"train_rollout_logprob_abs_diff_max": masked_max(difference, experience.response_mask)}
