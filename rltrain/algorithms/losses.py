"""Loss functions: what all of them share, and those of SFT, preferences, ranking and the critic."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rltrain.config import schema
from rltrain.data.experience import Experience

# What every loss function has in common: sums that are divided once, and what each token counts for in them.

Normalization = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of a mini-batch's loss and metrics, undivided: all are scalars.

    The mini-batch's loss is the sum of `loss` over all its micro-batches and data-parallel ranks over the sum of
    `divisor`; so are the metrics in `sums`. Those in `token_sums` are divided by the number of response tokens instead,
    and `maxima` are combined by maximum. The micro-batches of one mini-batch may therefore come at any time and in any
    number. Only `loss` carries a gradient.
    """

    loss: Tensor
    divisor: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[..., LossOutput]
"""(micro-batch, what the model says of each of its tokens: [tokens] each) -> LossOutput.

A policy's loss function is given logprobs and entropy, a critic's values. The micro-batch's tensors are on their
device. They stand at the index of the token they belong to; what they hold outside the response mask is ignored. A
micro-batch of no samples gives zeros, under the same names.
"""


@dataclass(frozen=True)
class TokenWeights:
    """What the tokens of a micro-batch count for."""

    factor: Tensor
    """[tokens] fp32, by which each token's loss goes into the sum."""
    divisor: Tensor
    """Scalar that the micro-batch adds to the divisor."""


def token_weights(experience: Experience, normalization: Normalization, max_response_tokens: int = 1) -> TokenWeights:
    """Factors (0 outside the response) and divisor under a normalization. Samples without a response count nowhere.

    token_mean: every response token of the mini-batch weighs the same. sequence_mean: every sequence weighs the same,
    and so does every token within one. dr_grpo: every token weighs 1 / (sequences * max_response_tokens), which
    removes the preference for short answers that dividing by a length gives (Liu et al. 2025, "Understanding
    R1-Zero-Like Training"); the paper also leaves advantages undivided by the standard deviation.
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
    """[samples] what each adds to the divisor of `token_weights`."""
    lengths = response_lengths(experience)
    if normalization == "token_mean":
        return lengths.float()
    return (lengths > 0).float() * (max_response_tokens if normalization == "dr_grpo" else 1)


@dataclass(frozen=True)
class SharedLoss:
    """A loss function whose divisor is not the number of response tokens: `shares` tells what each sample adds to it,
    [samples]."""

    function: LossFunction
    shares: Callable[[Experience], Tensor]

    def __call__(self, *arguments: Any) -> LossOutput:
        return self.function(*arguments)


def sample_shares(loss_function: LossFunction, experience: Experience) -> Tensor:
    """[samples] what each counts for in the loss, so that other losses of samples can be added to it: their sum over a
    mini-batch is its divisor, as far as loss.correction leaves nothing out."""
    if isinstance(loss_function, SharedLoss):
        return loss_function.shares(experience)
    return divisor_shares(experience, "token_mean")


def sample_index(experience: Experience) -> Tensor:
    """[tokens] the sample each packed token belongs to."""
    samples = torch.arange(experience.num_samples, device=experience.lengths.device)
    return torch.repeat_interleave(samples, experience.lengths, output_size=experience.num_tokens)


def response_lengths(experience: Experience) -> Tensor:
    """[samples] number of response tokens."""
    zeros = torch.zeros_like(experience.lengths)
    return zeros.index_add(0, sample_index(experience), experience.response_mask.to(zeros.dtype))


def sample_sums(experience: Experience, values: Tensor) -> Tensor:
    """[samples] sum of `values` [tokens] over each sample's tokens, 0 outside the response.

    In one order on every rank and in every run, unlike index_add on a GPU: a clip that depends on a sum is then decided
    alike on all tensor-parallel ranks.
    """
    # unsafe leaves out checks that refuse a micro-batch of no samples, and that wait for a GPU.
    total: Tensor = torch.segment_reduce(values, "sum", lengths=experience.lengths, unsafe=True)
    return total


def sample_means(experience: Experience, values: Tensor) -> Tensor:
    """[tokens] at every token the mean of `values`, 0 outside the response, over its sample's response tokens."""
    means = sample_sums(experience, values) / response_lengths(experience).clamp(min=1)
    return means[sample_index(experience)]


def of_response(experience: Experience, name: str) -> Tensor:
    """[tokens] the named field, 0 outside the response. ValueError where the experience lacks it."""
    values: Tensor = getattr(experience, name)
    return values.masked_fill(~experience.response_mask, 0)


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Scalar sum of values * weights over tokens of non-zero weight; values elsewhere may be anything, even NaN."""
    return (values.masked_fill(weights == 0, 0) * weights).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar maximum over the mask of values known to be >= 0; 0 for an empty mask."""
    return torch.cat([values.detach()[mask], values.new_zeros(1)]).max()


# The loss of supervised fine-tuning: mean negative log-likelihood of the response tokens.


def likelihood_loss() -> LossFunction:
    """Cross-entropy over response tokens, every response token of the mini-batch weighing the same.

    The entropy is left out where the model's evaluation has none.
    """

    def loss_function(experience: Experience, logprobs: Tensor, entropy: Tensor | None = None) -> LossOutput:
        weights = token_weights(experience, "token_mean")
        return LossOutput(
            loss=masked_sum(-logprobs, weights.factor),
            divisor=weights.divisor,
            token_sums={} if entropy is None else {"entropy": masked_sum(entropy.detach(), weights.factor)},
        )

    return loss_function


# Pairs of samples of which one was preferred: what is compared, and what is reported of it.


def sides(experience: Experience, of_samples: Tensor) -> tuple[Tensor, Tensor]:
    """[pairs] each, in one order: what `of_samples` [samples] has of the chosen samples, and of the rejected ones."""
    return of_samples[experience.chosen], of_samples[~experience.chosen]


def response_sums(experience: Experience, of_tokens: Tensor) -> Tensor:
    """[samples] sums over response tokens. What `of_tokens` [tokens] hold elsewhere is ignored; gradients flow."""
    zeros = of_tokens.new_zeros(experience.num_samples)
    return zeros.index_add(0, sample_index(experience), of_tokens.masked_fill(~experience.response_mask, 0))


def comparison(experience: Experience, rewards: Tensor) -> dict[str, Tensor]:
    """Sums over pairs of what `rewards` [samples] say of them: whether the chosen sample has more, by how much, what
    each has; and how many of the samples were cut."""
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
    """Scalar fp32."""
    return experience.chosen.sum(dtype=torch.float32)


def pair_shares(experience: Experience) -> Tensor:
    """[samples] fp32: each is half of a pair."""
    return torch.full_like(experience.lengths, 0.5, dtype=torch.float32)


# Losses of a policy that learns from pairs, against a reference: DPO, its form for uncertain labels, and IPO.


def preference_loss(log_ratio_difference: Tensor, settings: schema.Preference) -> Tensor:
    """[pairs] loss of h = log(p(chosen) / p_ref(chosen)) - log(p(rejected) / p_ref(rejected)), [pairs].

    sigmoid: -log sigmoid(beta h), Rafailov et al. 2023, "Direct Preference Optimization", equation 7; with the share e
    of labels taken to be wrong (label_smoothing) -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), Mitchell 2023,
    "A note on DPO with noisy preferences". ipo: (h - 1 / (2 beta))^2, Azar et al. 2023, "A General Theoretical Paradigm
    to Understand Learning from Human Preferences", equation 17.
    """
    if settings.loss == "ipo":
        return (log_ratio_difference - 1 / (2 * settings.beta)).square()
    logits, wrong = settings.beta * log_ratio_difference, settings.label_smoothing
    return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)


def direct_preference_loss(settings: schema.Preference) -> LossFunction:
    """(micro-batch of whole pairs, log-probs, ...) -> its mean over pairs, and what DPO takes for rewards: beta times
    the log-ratio of a response.

    With sft_coef comes that times the chosen response's mean negative log-prob per token, Pang et al. 2024, "Iterative
    Reasoning Preference Optimization", equation 1. The micro-batch needs reference_logprobs.
    """

    def loss_function(experience: Experience, logprobs: Tensor, *of_distributions: Tensor) -> LossOutput:
        # Long responses have large sums, of which the difference would be rounding.
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


# The loss of a reward model that learns from pairs.


def sample_scores(experience: Experience, scores: Tensor) -> Tensor:
    """[samples] of a sample its score up to and with its last token, of `scores` [tokens]; gradients flow."""
    return scores[experience.offsets()[1:] - 1]


def ranking_loss(settings: schema.Preference) -> LossFunction:
    """(micro-batch of whole pairs, scores [tokens]) -> its mean over pairs of -log sigmoid(chosen - rejected - margin)
    of their samples' scores: Bradley and Terry 1952 as in Ouyang et al. 2022, "Training language models to follow
    instructions", equation 1, with the margin of Touvron et al. 2023, "Llama 2", equation 2, where rows have one.

    With center_coef comes that times (chosen + rejected)^2, which keeps scores around 0: Eisenstein et al. 2023,
    "Helping or Herding?", equation 2.
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


# The critic's loss: squared error of its values, clipped, and how much of the returns' variance they explain.

# A variance of returns below this share of their mean square is rounding.
RELATIVE_ROUNDING = 1e-12


def before_tokens(scores: Tensor, lengths: Tensor) -> Tensor:
    """[tokens] the value of the state before every token: the score of its sample up to the token before, and 0 at a
    sample's first one. Gradients flow.

    `scores` [tokens] are a value model's, `lengths` [samples] those of the samples.
    """
    follows = torch.ones_like(scores)
    follows[(lengths.cumsum(0) - lengths)] = 0
    return scores.roll(1) * follows


def of_states(loss_function: LossFunction) -> LossFunction:
    """`loss_function` of values, for a model that gives scores."""

    def of_scores(experience: Experience, scores: Tensor) -> LossOutput:
        return loss_function(experience, before_tokens(scores, experience.lengths))

    return of_scores


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token loss max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2) / 2, and where the clip binds (bool).

    As in OpenAI's baselines for PPO, of whose paper's L^VF this is the clipped variant. None: no clip.
    """
    unclipped = (values - returns).square()
    if clip is None:
        return unclipped / 2, torch.zeros_like(values, dtype=torch.bool)
    # A value between these bounds stays as it is. old + (value - old) may round, and the clip would seem to bind.
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(unclipped, clipped) / 2, (clipped > unclipped).detach()


def value_loss(clip: float | None) -> LossFunction:
    """The critic's loss function: (micro-batch, values [tokens]) -> its mean over response tokens.

    The micro-batch needs returns, and the values that they were made from. `summarize` turns the metrics into reported
    ones.
    """

    def loss_function(experience: Experience, values: Tensor) -> LossOutput:
        mask = experience.response_mask
        current, returns = values.masked_fill(~mask, 0), of_response(experience, "returns")
        per_token, clip_binds = clipped_value_loss(current, returns, of_response(experience, "values"), clip)
        weights = token_weights(experience, "token_mean")
        # A variance is a small difference of large sums.
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
            token_sums={name: masked_sum(value, mask.to(value.dtype)) for name, value in token_means.items()},
        )

    return loss_function


def summarize(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` of a mini-batch with explained_variance, 1 - variance(returns - values) / variance(returns), in the
    place of the means that it is made of. NaN where all returns are equal: there is nothing to explain."""
    moments = ("return_square", "residual_mean", "residual_square")
    reported = {name: value for name, value in metrics.items() if name not in moments}
    square = metrics["return_square"]
    variance = square - metrics["return_mean"] ** 2
    unexplained = metrics["residual_square"] - metrics["residual_mean"] ** 2
    explained = 1 - unexplained / variance if variance > RELATIVE_ROUNDING * square else math.nan
    return {**reported, "explained_variance": explained}
