"""Policy losses by name, and the loss of a policy that is made of one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.advantages import Rectangle
from rltrain.algorithms.correction import corrected, is_asked_for
from rltrain.algorithms.kl import divergence_from, kl_estimate, teacher_distance
from rltrain.algorithms.losses import (
    LossFunction,
    LossOutput,
    SharedLoss,
    divisor_shares,
    masked_max,
    masked_sum,
    of_response,
    sample_means,
    token_weights,
)
from rltrain.algorithms.reinforcement import OwnFunction
from rltrain.config import schema
from rltrain.data.experience import Experience

# What policy losses are made of, and what they give.


@dataclass(frozen=True)
class ResponseTokens:
    """A micro-batch's tokens as a policy loss sees them: [tokens], 0 outside the response mask, the ratio 1 there.

    Only `logprobs` and `ratio` carry a gradient.
    """

    experience: Experience
    logprobs: Tensor
    """Of the weights that are trained."""
    old_logprobs: Tensor
    ratio: Tensor
    """exp(logprobs - old_logprobs)."""
    advantages: Tensor

    @classmethod
    def of(cls, experience: Experience, logprobs: Tensor, old: str) -> "ResponseTokens":
        """`old` is the field that the ratio's denominator comes from."""
        # Values outside the response must not reach exp: an infinity there turns a zero gradient into NaN.
        logprobs = logprobs.masked_fill(~experience.response_mask, 0)
        old_logprobs = of_response(experience, old)
        ratio = (logprobs - old_logprobs).exp()
        return cls(experience, logprobs, old_logprobs, ratio, of_response(experience, "advantages"))

    @property
    def mask(self) -> Tensor:
        return self.experience.response_mask


@dataclass(frozen=True)
class Surrogate:
    """What is minimized in the place of the expected reward's negative."""

    per_token: Tensor
    """[tokens] of which the policy loss is a weighted sum; without meaning outside the response."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """[tokens] bool, no gradient: metrics that are shares of the response tokens, of the same names in every call."""
    total: Tensor | None = None
    """Scalar: the weighted sum itself, where it is not known of tokens."""


# CISPO: the ratio weighs the log-prob's gradient and is clipped itself, so that every token goes on teaching.


def cispo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi; sg stops gradients.

    MiniMax 2025, "MiniMax-M1", section 3.1, where there is no lower bound: clip_low 1 or more.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, {"pg_clipfrac": weight != ratio})


# PPO's clipped surrogate, with DAPO's separate bounds and a second clip where configured.


def clip(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A with c = settings.dual_clip.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; separate bounds as in DAPO (Yu et al.
    2025, equation 10); the second clip as in Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning": without it one token of a large ratio and a negative advantage has no bound.
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    per_token = torch.maximum(unclipped, clipped)
    shares = {"pg_clipfrac": clipped > unclipped}
    if settings.dual_clip is not None:
        bound = -settings.dual_clip * advantages
        shares["dual_clipfrac"] = (per_token > bound) & (advantages < 0)
        per_token = torch.where(advantages < 0, torch.minimum(per_token, bound), per_token)
    return Surrogate(per_token, shares)


# How much of the policy's entropy a token's update costs: its part in the covariance of log-probs and advantages.


def covariances(tokens: ResponseTokens) -> Tensor:
    """[tokens] (log pi - mean log pi) (A - mean A), means over the micro-batch's response tokens; 0 outside.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. Their
    implementation takes the means over a micro-batch too: another split into micro-batches chooses other tokens.
    """
    logprobs, advantages = tokens.logprobs.detach(), tokens.advantages
    count = tokens.mask.sum().clamp(min=1)
    product = (logprobs - logprobs.sum() / count) * (advantages - advantages.sum() / count)
    return product.masked_fill(~tokens.mask, 0)


def number_chosen(tokens: ResponseTokens, ratio: float) -> int:
    """`ratio` of the micro-batch's response tokens, rounded down, and at least one."""
    return max(int(ratio * int(tokens.mask.sum())), 1)


# Clip-Cov: PPO's clip, and no gradient from a few of the tokens whose update costs the most entropy.


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


# Divergence proximal policy optimization: how far a token's distribution moved says when it stops teaching.

PROBABILITY_EPS = 1e-8
"""Beside the probability of all other tokens, which may be 0."""


def dppo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-sg[min(r, c)] A log pi, and 0 where the token's probability has gone further than a bound in the direction in
    which A moves it; sg stops gradients, c is settings.dppo.ratio_max.

    Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, equations 13 and 14:
    the distance is that of two outcomes, the token and all others; clip_low is its bound for A < 0, clip_high for
    A > 0.
    """
    present, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    distance = (present - old).abs() if settings.dppo.divergence == "tv" else binary_kl(old, present)
    rose, fell = tokens.advantages > 0, tokens.advantages < 0
    stopped = rose & (present > old) & (distance > settings.clip_high)
    stopped |= fell & (present < old) & (distance > settings.clip_low)
    ratio, bound = tokens.ratio.detach(), settings.dppo.ratio_max
    weight = ratio if bound is None else ratio.clamp(max=bound)
    per_token = (-weight * tokens.advantages * tokens.logprobs).masked_fill(stopped, 0)
    return Surrogate(per_token, {"pg_clipfrac": stopped})


def binary_kl(old: Tensor, present: Tensor) -> Tensor:
    """[tokens] KL(old || present) of a token of these probabilities and all others as one outcome."""
    others = torch.log((1 - old + PROBABILITY_EPS) / (1 - present + PROBABILITY_EPS))
    return old * (old.log() - present.log()) + (1 - old) * others


# Geometric-mean policy optimization: a sequence counts by the geometric mean of its tokens' clipped ratios.


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


# Group sequence policy optimization: one ratio for a whole sequence, clipped as one.


def gspo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t) with s_t = sg[s] pi_t / sg[pi_t], where s is the geometric mean
    of the sequence's ratios and sg stops gradients: s_t is s in value, and moves with its own token alone.

    Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.3. Where a sequence's tokens have one
    advantage, and under normalization sequence_mean, value and gradient are those of section 4.1, of whole sequences.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    of_sequence = sample_means(tokens.experience, log_ratio)
    ratio = (of_sequence + tokens.logprobs - tokens.logprobs.detach()).exp()
    unclipped = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return Surrogate(torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped})


# KL-Cov: no clip, and a penalty on the few tokens whose update costs the most entropy.


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


# A policy loss that is a function of the user's.

PACKED = ("logprobs", "old_logprobs", "advantages")
OF_PACKED = (*PACKED, "mask", "ratio", "rollout_logprobs", "lengths")
PADDED = ("log_probs", "old_log_probs", "advantages")
OF_PADDED = (*PADDED, "loss_mask", "rollout_logprobs", "config")
"""SkyRL's names."""


def own_policy_loss(settings: schema.Loss) -> Callable[[ResponseTokens, schema.Loss], Surrogate]:
    """That of settings.function, by its parameters' names. ConfigError where there is none that can be called.

    (logprobs, old_logprobs, advantages, ...) gives [tokens] the loss of each, which is weighed and averaged as any
    other. (log_probs, old_log_probs, advantages, ...) is SkyRL's form: rows of samples, advantages with the factors of
    loss.normalization in them, and the answer is their sum, perhaps with a dict of metrics, which is left.
    """
    function = OwnFunction.of(settings.function or "", "loss.function")
    is_padded = function.takes(PADDED)
    function.require_known((PACKED, PADDED), OF_PADDED if is_padded else OF_PACKED)
    if is_padded and is_asked_for(settings.correction):
        raise function.error(
            f"gives a sum, whose tokens loss.correction cannot weigh; expected no loss.correction, or a function of "
            f"({', '.join(PACKED)}) that gives the loss of each token"
        )
    made = _of_rows if is_padded else _of_tokens

    def surrogate(tokens: ResponseTokens, loss: schema.Loss) -> Surrogate:
        return made(function, tokens, loss)

    return surrogate


def _of_tokens(function: OwnFunction, tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    experience = tokens.experience
    answer = function.call(
        {
            "logprobs": tokens.logprobs,
            "old_logprobs": tokens.old_logprobs,
            "advantages": tokens.advantages,
            "mask": tokens.mask,
            "ratio": tokens.ratio,
            "rollout_logprobs": of_response(experience, "rollout_logprobs"),
            "lengths": experience.lengths,
        }
    )
    if not isinstance(answer, Tensor) or answer.shape != tokens.logprobs.shape:
        raise function.error(f"returned {_form(answer)}; expected the loss of each of {len(tokens.logprobs)} tokens")
    return Surrogate(answer)


def _of_rows(function: OwnFunction, tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    experience = tokens.experience
    nothing = torch.zeros_like(tokens.logprobs)
    if not experience.num_samples:
        return Surrogate(nothing, total=tokens.logprobs.sum() * 0)
    rows = Rectangle.of(experience)
    factors = token_weights(experience, settings.normalization).factor
    bounds = {"eps_clip_low": settings.clip_low, "eps_clip_high": settings.clip_high}
    answer = function.call(
        {
            "log_probs": rows.padded(tokens.logprobs),
            "old_log_probs": rows.padded(tokens.old_logprobs),
            "advantages": rows.padded(tokens.advantages * factors),
            "loss_mask": rows.padded(tokens.mask.to(factors.dtype)),
            "rollout_logprobs": rows.padded(of_response(experience, "rollout_logprobs")),
            "config": SimpleNamespace(**bounds, clip_ratio_c=settings.dual_clip or 3.0),
        }
    )
    total = answer[0] if isinstance(answer, tuple) and answer else answer
    if not isinstance(total, Tensor) or total.dim():
        raise function.error(f"returned {_form(total)}; expected a tensor with one number, alone or before a dict")
    return Surrogate(nothing, total=total)


def _form(answer: Any) -> str:
    return f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r:.60}"


# REINFORCE: the policy gradient as it stands, with no ratio and no clip.


def reinforce(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-A log pi.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". What
    other weights drew, loss.correction weighs: with old_logprobs rollout by the present weights against the engine.
    """
    return Surrogate(-tokens.advantages * tokens.logprobs)


# Soft adaptive policy optimization: a smooth gate in the place of the clip.


def sapo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-4 / tau sigmoid(tau (r - 1)) A with tau = tau_pos where A > 0, else tau_neg. At r = 1 its gradient is that of
    -r A, and it fades with the distance from there.

    Gao et al. 2025, "Soft Adaptive Policy Optimization", equations 5 and 6.
    """
    positive = tokens.advantages > 0
    tau = torch.where(positive, settings.sapo.tau_pos, settings.sapo.tau_neg).to(tokens.ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
    return Surrogate(-gate * tokens.advantages)


# Policy losses by the names that a config gives them.

PolicyLoss = Callable[[ResponseTokens, schema.Loss], Surrogate]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.__name__: loss for loss in (clip, gspo, cispo, sapo, clip_cov, kl_cov, geometric_mean, dppo, reinforce)
}


def policy_loss_of(settings: schema.Loss) -> PolicyLoss:
    """That of settings.policy. ConfigError where it is the user's and cannot be called."""
    return own_policy_loss(settings) if settings.policy == "own" else POLICY_LOSSES[settings.policy]


# The loss of a policy that learns from what it drew: a surrogate of the ratio, corrected for who drew the tokens, with
# an entropy bonus and a KL term where configured. Algorithms differ in where the advantages come from.


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
