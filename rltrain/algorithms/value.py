"""The critic's loss: squared error of its values, clipped, and how much of the returns' variance they explain."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput, masked_sum, of_response, token_weights
from rltrain.data.experience import Experience

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
