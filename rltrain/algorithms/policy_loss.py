"""Policy losses by name, and the whole loss of a policy: policy loss, entropy bonus and KL terms."""

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
    response_totals,
    sample_means,
    token_weights,
)
from rltrain.algorithms.reinforcement import OwnFunction
from rltrain.config import schema
from rltrain.data.experience import Experience

# Inputs and outputs of a policy loss.


@dataclass(frozen=True)
class ResponseTokens:
    """The tokens of a micro-batch, as arguments of a policy loss. Tensors have shape [tokens].

    Outside the response mask all values are 0, except `ratio`: it is 1. Only `logprobs` and `ratio` carry a gradient.
    """

    experience: Experience
    logprobs: Tensor
    """Log-probs under the trained weights."""
    old_logprobs: Tensor
    ratio: Tensor
    """exp(logprobs - old_logprobs)."""
    advantages: Tensor

    @classmethod
    def of(cls, experience: Experience, logprobs: Tensor, old: str) -> "ResponseTokens":
        """Builds the tokens. `old` is the experience field for the ratio's denominator."""
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
    """A surrogate loss. Minimizing it maximizes the expected reward."""

    per_token: Tensor
    """Loss per token, [tokens]. The policy loss is a weighted sum of it. Values outside the response are arbitrary."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Metrics as bool masks [tokens] without gradient: shares of the response tokens. The names are the same in every
    call."""
    total: Tensor | None = None
    """Scalar: the weighted sum itself, if the loss is not known per token."""


# CISPO: the clipped ratio is a constant weight of the log-prob, so every token keeps a gradient.


def cispo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -sg[clip(r, 1 - low, 1 + high)] A log pi, with sg stopping gradients.

    MiniMax 2025, "MiniMax-M1", section 3.1. The paper has no lower bound: set clip_low to 1 or more.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, {"pg_clipfrac": weight != ratio})


# PPO's clipped surrogate, with DAPO's separate bounds and an optional second clip.


def clip(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A). For A < 0 it is at most -c A with c = settings.dual_clip.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; separate bounds as in DAPO (Yu et al.
    2025, equation 10). The second clip is from Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning". Without it, one token with a large ratio and a negative advantage is unbounded.
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


# The covariance of log-probs and advantages: a measure of the entropy lost by training on a token.


def covariances(tokens: ResponseTokens) -> Tensor:
    """Returns (log pi - mean log pi) (A - mean A) per token, and 0 outside the response, shape [tokens].

    The means are over the micro-batch's response tokens, as in the implementation of the paper. Another split into
    micro-batches therefore selects other tokens. Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for
    Reasoning Language Models", section 4.
    """
    logprobs, advantages = tokens.logprobs.detach(), tokens.advantages
    count = tokens.mask.sum().clamp(min=1)
    product = (logprobs - logprobs.sum() / count) * (advantages - advantages.sum() / count)
    return product.masked_fill(~tokens.mask, 0)


def number_chosen(tokens: ResponseTokens, ratio: float) -> int:
    """Returns `ratio` times the number of response tokens in the micro-batch, rounded down and at least 1."""
    return max(int(ratio * int(tokens.mask.sum())), 1)


# Clip-Cov: PPO's clip, without gradient for a few of the tokens with the largest loss of entropy.


def clip_cov(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns PPO's clipped loss, and 0 for the tokens chosen by `drawn_tokens`.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. Tokens
    are chosen per micro-batch, as in their implementation.
    """
    clipped = clip(tokens, settings)
    chosen = drawn_tokens(tokens, settings.clip_cov, clipped.shares["pg_clipfrac"])
    return Surrogate(clipped.per_token.masked_fill(chosen, 0), {**clipped.shares, "covariance_tokens": chosen})


def drawn_tokens(tokens: ResponseTokens, settings: schema.ClipCov, clip_binds: Tensor) -> Tensor:
    """Returns a bool mask [tokens] of randomly chosen response tokens with a covariance between low and high.

    Their number is the share settings.ratio of all response tokens. Tokens with a binding clip are never chosen.
    """
    covariance = covariances(tokens)
    within = (covariance > settings.low) & (covariance < settings.high) & tokens.mask & ~clip_binds
    candidates = torch.nonzero(within).flatten()
    # The same choice on every tensor-parallel rank, and in a repeated run.
    generator = torch.Generator().manual_seed(len(candidates))
    order = torch.randperm(len(candidates), generator=generator)[: number_chosen(tokens, settings.ratio)]
    chosen = torch.zeros_like(tokens.mask)
    chosen[candidates[order.to(candidates.device)]] = True
    return chosen


# Divergence proximal policy optimization: a token gets no gradient once its distribution has moved too far.

PROBABILITY_EPS = 1e-8
"""Added to the probability of all other tokens, because that may be 0."""


def dppo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -sg[min(r, c)] A log pi, or 0 for tokens beyond a bound. sg stops gradients, c is
    settings.dppo.ratio_max.

    A token is beyond the bound if its probability already moved too far in the direction of A. The distance compares
    two outcomes: the token, and all other tokens together. The bound is clip_low for A < 0 and clip_high for A > 0. Qi
    et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, equations 13 and 14.
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
    """Returns KL(old || present) of two outcomes, [tokens]: a token with these probabilities, and all other tokens."""
    others = torch.log((1 - old + PROBABILITY_EPS) / (1 - present + PROBABILITY_EPS))
    return old * (old.log() - present.log()) + (1 - old) * others


# Geometric-mean policy optimization: a sequence is weighted by the geometric mean of its tokens' clipped ratios.


def geometric_mean(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -A exp(mean over the sequence of l_t) for every token of a sequence.

    l is min(log r, high) for tokens with A > 0, and max(log r, -low) for A < 0: the bounds are for log-ratios. The
    factor A is the mean of the sequence's advantages. With normalization sequence_mean, value and gradient equal a mean
    over sequences. Zhao et al. 2025, "Geometric-Mean Policy Optimization": their bounds e^-0.4 and e^0.4 are clip_low =
    clip_high = 0.4.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    held = torch.where(positive, log_ratio.clamp(max=settings.clip_high), log_ratio)
    held = torch.where(negative, log_ratio.clamp(min=-settings.clip_low), held)
    ratio = sample_means(tokens.experience, held).exp()
    advantage = sample_means(tokens.experience, tokens.advantages)
    return Surrogate(-ratio * advantage, {"pg_clipfrac": held != log_ratio})


# Group sequence policy optimization: one clipped ratio for a whole sequence.


def gspo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t) with s_t = sg[s] pi_t / sg[pi_t].

    s is the geometric mean of the sequence's ratios, and sg stops gradients. So s_t has the value of s, but only the
    gradient of its own token.

    Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.3. With one advantage per sequence and
    normalization sequence_mean, value and gradient equal those of section 4.1 for whole sequences.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    of_sequence = sample_means(tokens.experience, log_ratio)
    ratio = (of_sequence + tokens.logprobs - tokens.logprobs.detach()).exp()
    unclipped = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return Surrogate(torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped})


# KL-Cov: no clip, but a penalty for the few tokens with the largest loss of entropy.


def kl_cov(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -r A, plus coef |log r| for the tokens of `largest_covariances`.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. As in
    their implementation, tokens are chosen per micro-batch, and |log r| is the divergence from the old policy.
    """
    chosen = largest_covariances(tokens, settings.kl_cov.ratio)
    distance = (tokens.logprobs - tokens.old_logprobs).abs().masked_fill(~chosen, 0)
    per_token = -tokens.ratio * tokens.advantages + settings.kl_cov.coef * distance
    return Surrogate(per_token, {"covariance_tokens": chosen})


def largest_covariances(tokens: ResponseTokens, ratio: float) -> Tensor:
    """Returns a bool mask [tokens] of the share `ratio` of the micro-batch's response tokens, at least one token.

    They have the largest `covariances` of log-prob and advantage.
    """
    covariance = covariances(tokens).masked_fill(~tokens.mask, -torch.inf)
    order = torch.argsort(covariance, descending=True, stable=True)[: number_chosen(tokens, ratio)]
    chosen = torch.zeros_like(tokens.mask)
    chosen[order] = True
    return chosen & tokens.mask


# The user's own policy loss.

PACKED = ("logprobs", "old_logprobs", "advantages")
OF_PACKED = (*PACKED, "mask", "ratio", "rollout_logprobs", "lengths")
PADDED = ("log_probs", "old_log_probs", "advantages")
OF_PADDED = (*PADDED, "loss_mask", "rollout_logprobs", "config")
"""The parameter names of SkyRL."""


def own_policy_loss(settings: schema.Loss) -> Callable[[ResponseTokens, schema.Loss], Surrogate]:
    """Returns a policy loss from the user function settings.function, in one of two forms chosen by its parameter
    names.

    (logprobs, old_logprobs, advantages, ...) returns the loss per token, [tokens]. It is weighted and averaged like any
    other policy loss.

    (log_probs, old_log_probs, advantages, ...) is SkyRL's form with padded rows of samples. The advantages contain the
    factors of loss.normalization. The function returns the sum of the loss, or a tuple of the sum and a dict of
    metrics. The metrics are ignored.

    Raises ConfigError if the function does not exist or its parameters do not fit.
    """
    function = OwnFunction.of(settings.function or "", "loss.function")
    is_padded = function.takes(PADDED)
    function.require_known((PACKED, PADDED), OF_PADDED if is_padded else OF_PACKED)
    if is_padded and is_asked_for(settings.correction):
        raise function.error(
            f"returns a sum, and loss.correction needs the loss of each token; expected no loss.correction, or a "
            f"function of ({', '.join(PACKED)}) that returns the loss of each token"
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


# REINFORCE: the plain policy gradient, without ratio or clip.


def reinforce(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -A log pi.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". For
    samples of other weights, loss.correction supplies importance weights. With old_logprobs: rollout they compare the
    present weights with the engine.
    """
    return Surrogate(-tokens.advantages * tokens.logprobs)


# Soft adaptive policy optimization: a smooth gate instead of a clip.


def sapo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """Returns -4 / tau sigmoid(tau (r - 1)) A, with tau = tau_pos for A > 0, else tau_neg.

    At r = 1 its gradient is that of -r A, and it fades as r moves away from 1. Gao et al. 2025, "Soft Adaptive Policy
    Optimization", equations 5 and 6.
    """
    positive = tokens.advantages > 0
    tau = torch.where(positive, settings.sapo.tau_pos, settings.sapo.tau_neg).to(tokens.ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
    return Surrogate(-gate * tokens.advantages)


# The table of policy losses by their config names.

PolicyLoss = Callable[[ResponseTokens, schema.Loss], Surrogate]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.__name__: loss for loss in (clip, gspo, cispo, sapo, clip_cov, kl_cov, geometric_mean, dppo, reinforce)
}


def policy_loss_of(settings: schema.Loss) -> PolicyLoss:
    """Returns the policy loss of settings.policy. Raises ConfigError if the user's own function cannot be called."""
    return own_policy_loss(settings) if settings.policy == "own" else POLICY_LOSSES[settings.policy]


# The loss of a policy: a surrogate with off-policy correction, an entropy bonus and optional KL terms. Algorithms
# differ only in their advantages.


def policy_loss(settings: schema.Loss, max_response_tokens: int, teacher: schema.Teacher | None = None) -> LossFunction:
    """Builds the policy's loss function of one job. `max_response_tokens` is part of the divisor of normalization
    dr_grpo.

    The micro-batch needs advantages, and actor_logprobs if settings.old_logprobs is "actor". It needs
    reference_logprobs if the loss has a KL term. With teacher_logprobs, the distance from `teacher` is reported, and
    added to the loss if teacher.where is "loss". `correction.summarize` turns the raw metrics into reported ones.
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
        token_means |= {"ratio": tokens.ratio, "entropy": entropy, **surrogate.shares, **correction.token_means}
        return LossOutput(
            loss=loss,
            divisor=weights.divisor,
            sums={name: value.detach() for name, value in sums.items()},
            token_sums=response_totals(experience, token_means),
            maxima={"ratio_max": masked_max(tokens.ratio, tokens.mask), **maxima},
        )

    return SharedLoss(
        loss_function,
        partial(divisor_shares, normalization=settings.normalization, max_response_tokens=max_response_tokens),
    )


def kl_term(tokens: ResponseTokens, settings: schema.Kl, of_asked: Sequence[Tensor] = ()) -> Tensor:
    """Returns KL(policy || reference) over the vocabulary, or its estimate from the sampled token, shape [tokens].

    The KL over the vocabulary is for estimator "full", with the distribution of the reference in the experience.
    `of_asked` then has the policy's log-probs of `asked_tokens`, as in `divergence_from`. Estimates do not use it.

    By default an estimate is multiplied by `tokens.ratio`, the probability under the present policy over that under
    the old one (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1). Its mean over tokens of the old policy is then the KL,
    and its gradient is the KL's gradient. Without the ratio, only k2 has the KL's gradient, and only if old and present
    policy are equal.
    """
    if settings.estimator == "full":
        over_vocabulary = divergence_from("reference", tokens.experience, of_asked)
        assert over_vocabulary is not None, "the reference leaves its distribution with estimator full"
        return over_vocabulary
    estimate = kl_estimate(tokens.logprobs, of_response(tokens.experience, "reference_logprobs"), settings.estimator)
    return tokens.ratio * estimate if settings.is_weighed else estimate


def _metrics(experience: Experience, logprobs: Tensor, old: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns metrics to average [tokens], and maxima: the distances of the present log-probs from the others."""
    current = logprobs.masked_fill(~experience.response_mask, 0)
    difference = (current - of_response(experience, "rollout_logprobs")).abs()
    token_means = {"ppo_kl": of_response(experience, old) - current, "train_rollout_logprob_abs_diff": difference}
    if experience.has("reference_logprobs"):
        reference = of_response(experience, "reference_logprobs")
        token_means["reference_kl"] = kl_estimate(current, reference, "k3")
    return token_means, {"train_rollout_logprob_abs_diff_max": masked_max(difference, experience.response_mask)}
