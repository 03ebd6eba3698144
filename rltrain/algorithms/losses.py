"""Loss functions: their shared parts, and the losses of SFT, preference pairs, ranking and the critic."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rltrain.config import schema
from rltrain.data.experience import Experience

# The common part of loss functions: sums with one division per mini-batch, and the weight of each token.

Normalization = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's part of a mini-batch's loss and metrics, before the division. All values are scalars.

    The mini-batch's loss is the sum of `loss` divided by the sum of `divisor`, over all micro-batches and data-parallel
    ranks. Metrics in `sums` are divided in the same way. Metrics in `token_sums` are divided by the number of response
    tokens. `maxima` are combined by maximum. So the split into micro-batches and their order do not matter. Only `loss`
    carries a gradient.
    """

    loss: Tensor
    divisor: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[..., LossOutput]
"""(micro-batch, model outputs of shape [tokens] each) -> LossOutput.

A policy's loss function gets logprobs and entropy, a critic's gets values. The micro-batch's tensors are on the same
device. An output has the index of its own token, and outputs outside the response mask are ignored. A micro-batch
without samples gives zeros under the same names.
"""


@dataclass(frozen=True)
class TokenWeights:
    """The weights of a micro-batch's tokens in the loss."""

    factor: Tensor
    """Factor of each token's loss in the sum, fp32 [tokens]."""
    divisor: Tensor
    """The micro-batch's part of the divisor, a scalar."""


def token_weights(experience: Experience, normalization: Normalization, max_response_tokens: int = 1) -> TokenWeights:
    """Returns the factors (0 outside the response) and the divisor of a normalization.

    - token_mean: every response token of the mini-batch has the same weight.
    - sequence_mean: every sequence has the same weight, and so does every token within one.
    - dr_grpo: every token weighs 1 / (sequences * max_response_tokens).

    dr_grpo removes the bias of a division by length towards short answers (Liu et al. 2025, "Understanding R1-Zero-Like
    Training"). The paper also does not divide advantages by the standard deviation. Samples without a response do not
    count.
    """
    mask = experience.response_mask.float()
    if normalization == "token_mean":
        return TokenWeights(mask, mask.sum())
    lengths = response_lengths(experience)
    num_sequences = (lengths > 0).sum().float()
    if normalization == "dr_grpo":
        return TokenWeights(mask, num_sequences * max_response_tokens)
    return TokenWeights(mask / lengths.clamp(min=1).float()[sample_index(experience)], num_sequences)


def divisor_shares(experience: Experience, normalization: Normalization, max_response_tokens: int = 1) -> Tensor:
    """Returns each sample's part of the divisor of `token_weights`, [samples]."""
    lengths = response_lengths(experience)
    if normalization == "token_mean":
        return lengths.float()
    return (lengths > 0).float() * (max_response_tokens if normalization == "dr_grpo" else 1)


@dataclass(frozen=True)
class SharedLoss:
    """A loss function with its own divisor instead of the number of response tokens.

    `shares` returns each sample's part of the divisor, [samples].
    """

    function: LossFunction
    shares: Callable[[Experience], Tensor]

    def __call__(self, *arguments: Any) -> LossOutput:
        return self.function(*arguments)


def sample_shares(loss_function: LossFunction, experience: Experience) -> Tensor:
    """Returns each sample's weight in the loss, [samples]. Other losses per sample can be added with these weights.

    Their sum over a mini-batch is the divisor, unless loss.correction excludes tokens.
    """
    if isinstance(loss_function, SharedLoss):
        return loss_function.shares(experience)
    return divisor_shares(experience, "token_mean")


def sample_index(experience: Experience) -> Tensor:
    """Returns the sample of each packed token, [tokens]."""
    samples = torch.arange(experience.num_samples, device=experience.lengths.device)
    return torch.repeat_interleave(samples, experience.lengths, output_size=experience.num_tokens)


def response_lengths(experience: Experience) -> Tensor:
    """Returns the number of response tokens per sample, [samples]."""
    zeros = torch.zeros_like(experience.lengths)
    return zeros.index_add(0, sample_index(experience), experience.response_mask.to(zeros.dtype))


def sample_sums(experience: Experience, values: Tensor) -> Tensor:
    """Returns the sum of `values` over each sample's tokens, [samples]. `values` [tokens] must be 0 outside the
    response.

    The order of summation is fixed, unlike index_add on a GPU. So a clip of such a sum has the same outcome on all
    tensor-parallel ranks and in every run.
    """
    # unsafe skips two kinds of checks: some reject a micro-batch without samples, others wait for the GPU.
    total: Tensor = torch.segment_reduce(values, "sum", lengths=experience.lengths, unsafe=True)
    return total


def sample_means(experience: Experience, values: Tensor) -> Tensor:
    """Returns each sample's mean over its response tokens, [tokens]. `values` must be 0 outside the response."""
    means = sample_sums(experience, values) / response_lengths(experience).clamp(min=1)
    return means[sample_index(experience)]


def of_response(experience: Experience, name: str) -> Tensor:
    """Returns the named field [tokens] with 0 outside the response. Raises ValueError if the experience lacks it."""
    values: Tensor = getattr(experience, name)
    return values.masked_fill(~experience.response_mask, 0)


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the scalar sum of values * weights over tokens with non-zero weight. Other values may be anything, even
    NaN."""
    return (values.masked_fill(weights == 0, 0) * weights).sum()


def response_totals(experience: Experience, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the scalar sum of each of `values` over response tokens, without gradients. Other values may be anything,
    even NaN."""
    outside = ~experience.response_mask
    kinds = {name: one.dtype if one.is_floating_point() else torch.float32 for name, one in values.items()}
    return {name: one.detach().masked_fill(outside, 0).sum(dtype=kinds[name]) for name, one in values.items()}


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the scalar maximum over the mask, or 0 for an empty mask. Values must be at least 0."""
    return torch.cat([values.detach().masked_fill(~mask, 0), values.new_zeros(1)]).max()


# SFT: mean negative log-likelihood of the response tokens.


def likelihood_loss() -> LossFunction:
    """Returns the cross-entropy loss over response tokens. Every response token of the mini-batch has the same weight.

    The entropy metric is left out if the model computes no entropy.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor | None = None) -> LossOutput:
        weights = token_weights(experience, "token_mean")
        return LossOutput(
            loss=masked_sum(-logprobs, weights.factor),
            divisor=weights.divisor,
            token_sums=response_totals(experience, {} if entropy is None else {"entropy": entropy}),
        )

    return loss_function


# Pairs of a chosen and a rejected sample, and their metrics.


def sides(experience: Experience, of_samples: Tensor) -> tuple[Tensor, Tensor]:
    """Splits `of_samples` [samples] into chosen and rejected samples, [pairs] each, in the same order of pairs."""
    return of_samples[experience.chosen], of_samples[~experience.chosen]


def response_sums(experience: Experience, of_tokens: Tensor) -> Tensor:
    """Returns sums over response tokens, [samples]. Values of `of_tokens` [tokens] elsewhere are ignored. Gradients
    flow."""
    zeros = of_tokens.new_zeros(experience.num_samples)
    return zeros.index_add(0, sample_index(experience), of_tokens.masked_fill(~experience.response_mask, 0))


def comparison(experience: Experience, rewards: Tensor) -> dict[str, Tensor]:
    """Returns metrics as sums over pairs, from the `rewards` [samples].

    They are the number of pairs with a higher reward of the chosen sample, the margin, both rewards, and half the
    number of truncated samples.
    """
    chosen, rejected = sides(experience, rewards.detach())
    cut_chosen, cut_rejected = sides(experience, experience.truncated.float())
    return {
        "accuracy": (chosen > rejected).float().sum(),
        "margin": (chosen - rejected).sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "truncated_ratio": (cut_chosen + cut_rejected).sum() / 2,
    }


def num_pairs(experience: Experience) -> Tensor:
    """Returns the number of pairs as an fp32 scalar."""
    return experience.chosen.sum(dtype=torch.float32)


def pair_shares(experience: Experience) -> Tensor:
    """Returns fp32 [samples] of 0.5: each sample is half of a pair."""
    return torch.full_like(experience.lengths, 0.5, dtype=torch.float32)


# Policy losses for pairs relative to a reference: DPO, DPO with label smoothing, and IPO.


def preference_loss(log_ratio_difference: Tensor, settings: schema.Preference) -> Tensor:
    """Returns the loss [pairs] of h = log(p(chosen) / p_ref(chosen)) - log(p(rejected) / p_ref(rejected)), [pairs].

    sigmoid: -log sigmoid(beta h), Rafailov et al. 2023, "Direct Preference Optimization", equation 7.

    sigmoid with label_smoothing e, the assumed share of wrong labels: -(1 - e) log sigmoid(beta h) - e log
    sigmoid(-beta h), Mitchell 2023, "A note on DPO with noisy preferences".

    ipo: (h - 1 / (2 beta))^2, Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human
    Preferences", equation 17.
    """
    if settings.loss == "ipo":
        return (log_ratio_difference - 1 / (2 * settings.beta)).square()
    logits, wrong = settings.beta * log_ratio_difference, settings.label_smoothing
    return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)


def direct_preference_loss(settings: schema.Preference) -> LossFunction:
    """Builds the DPO loss function: (micro-batch of whole pairs, log-probs, ...) -> mean loss over pairs.

    Its metrics include DPO's implicit rewards: beta times the log-ratio of a response. The micro-batch needs
    reference_logprobs.

    With sft_coef it adds sft_coef times the chosen response's mean negative log-prob per token. Pang et al. 2024,
    "Iterative Reasoning Preference Optimization", equation 1.
    """

    def loss_function(experience: Experience, logprobs: Tensor, *of_distributions: Tensor) -> LossOutput:
        # Subtract before summing: long responses have large sums, and their difference would be mostly rounding.
        log_ratios = response_sums(experience, logprobs - experience.reference_logprobs)
        chosen, rejected = sides(experience, log_ratios)
        loss = preference_loss(chosen - rejected, settings).sum()
        sums = comparison(experience, settings.beta * log_ratios)
        chosen_logprobs, rejected_logprobs = sides(experience, response_sums(experience, logprobs))
        sums |= {"chosen_logprob": chosen_logprobs.detach().sum(), "rejected_logprob": rejected_logprobs.detach().sum()}
        if settings.sft_coef:
            lengths, _ = sides(experience, response_lengths(experience))
            sft_loss = -(chosen_logprobs / lengths.clamp(min=1)).sum()
            loss, sums["sft_loss"] = loss + settings.sft_coef * sft_loss, sft_loss.detach()
        return LossOutput(loss=loss, divisor=num_pairs(experience), sums=sums)

    return SharedLoss(loss_function, pair_shares)


# The loss of reward models for pairs.


def sample_scores(experience: Experience, scores: Tensor) -> Tensor:
    """Returns each sample's score at its last token, [samples], from `scores` [tokens]. Gradients flow."""
    return scores[experience.offsets()[1:] - 1]


def ranking_loss(settings: schema.Preference) -> LossFunction:
    """Builds the reward model's loss function: (micro-batch of whole pairs, scores [tokens]) -> mean loss over pairs.

    The loss of a pair is -log sigmoid(chosen - rejected - margin) of the two samples' scores: Bradley and Terry 1952,
    as in Ouyang et al. 2022, "Training language models to follow instructions", equation 1. The margin of the row, if
    any, is from Touvron et al. 2023, "Llama 2", equation 2.

    With center_coef it adds center_coef (chosen + rejected)^2 to keep scores near 0: Eisenstein et al. 2023, "Helping
    or Herding?", equation 2.
    """

    def loss_function(experience: Experience, scores: Tensor) -> LossOutput:
        of_samples = sample_scores(experience, scores)
        chosen, rejected = sides(experience, of_samples)
        difference = chosen - rejected
        if experience.has("margins"):
            difference = difference - sides(experience, experience.margins)[0]
        loss = -logsigmoid(difference).sum()
        sums = comparison(experience, of_samples)
        if settings.center_coef:
            center_loss = (chosen + rejected).square().sum()
            loss, sums["center_loss"] = loss + settings.center_coef * center_loss, center_loss.detach()
        return LossOutput(loss=loss, divisor=num_pairs(experience), sums=sums)

    return SharedLoss(loss_function, pair_shares)


# The critic's loss: clipped squared error of the values, and the explained variance of the returns.

# Share of the mean square. A smaller variance of returns counts as rounding error.
RELATIVE_ROUNDING = 1e-12


def before_tokens(scores: Tensor, lengths: Tensor) -> Tensor:
    """Returns the value of the state before every token, [tokens]: the score at the previous token of the same sample.

    It is 0 at a sample's first token. `scores` [tokens] are those of a value model. `lengths` [samples] count tokens.
    Gradients flow.
    """
    follows = torch.ones_like(scores)
    follows[(lengths.cumsum(0) - lengths)] = 0
    return scores.roll(1) * follows


def of_states(loss_function: LossFunction) -> LossFunction:
    """Adapts a `loss_function` of values to a model with scores."""

    def of_scores(experience: Experience, scores: Tensor) -> LossOutput:
        return loss_function(experience, before_tokens(scores, experience.lengths))

    return of_scores


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the loss per token and a bool mask of the tokens with a binding clip.

    The loss is max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2) / 2. This is the clipped variant of PPO's
    L^VF in OpenAI's baselines. None for `clip` means no clip.
    """
    unclipped = (values - returns).square()
    if clip is None:
        return unclipped / 2, torch.zeros_like(values, dtype=torch.bool)
    # A value between these bounds is unchanged. old + (value - old) may round, and the clip would seem to bind.
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(unclipped, clipped) / 2, (clipped > unclipped).detach()


def value_loss(clip: float | None) -> LossFunction:
    """Builds the critic's loss function: (micro-batch, values [tokens]) -> mean loss over response tokens.

    The micro-batch needs returns, and the values used to compute them. `summarize` turns the raw metrics into reported
    ones.
    """

    def loss_function(experience: Experience, values: Tensor) -> LossOutput:
        mask = experience.response_mask
        current, returns = values.masked_fill(~mask, 0), of_response(experience, "returns")
        per_token, clip_binds = clipped_value_loss(current, returns, of_response(experience, "values"), clip)
        weights = token_weights(experience, "token_mean")
        # Double precision: a variance is a small difference of large sums.
        residual, returns = returns.double() - current.detach().double(), returns.double()
        token_means = {
            "value_mean": current.detach(),
            "value_clipfrac": clip_binds.float(),
            "return_mean": returns,
            "return_square": returns.square(),
            "residual_mean": residual,
            "residual_square": residual.square(),
        }
        return LossOutput(
            loss=masked_sum(per_token, weights.factor),
            divisor=weights.divisor,
            token_sums=response_totals(experience, token_means),
        )

    return loss_function


def summarize(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns a mini-batch's metrics with explained_variance in place of the raw means.

    It is 1 - variance(returns - values) / variance(returns), or NaN if all returns are equal.
    """
    moments = ("return_square", "residual_mean", "residual_square")
    reported = {name: value for name, value in metrics.items() if name not in moments}
    square = metrics["return_square"]
    variance = square - metrics["return_mean"] ** 2
    unexplained = metrics["residual_square"] - metrics["residual_mean"] ** 2
    explained = 1 - unexplained / variance if variance > RELATIVE_ROUNDING * square else math.nan
    return {**reported, "explained_variance": explained}
