"""How far the trainer is from the engine that drew a step's tokens, where both had the same weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import LossFunction, LossOutput, SharedLoss, masked_sum, of_response
from rltrain.data.experience import Experience

SHARE, DIFFERENCE, KL = "fresh_tokens", "fresh_logprob_abs_diff", "fresh_kl"
METRICS = frozenset({SHARE, DIFFERENCE, KL})
"""Measured under the weights that drew the samples, which only a step's first mini-batch still has."""


def measuring_parity(loss_function: LossFunction, step: int) -> LossFunction:
    """A policy's loss function, samples counting for as much in it, that also sums METRICS over the tokens whose policy
    version is `step`."""

    def measured(experience: Experience, logprobs: Tensor, *others: Any) -> LossOutput:
        output = loss_function(experience, logprobs, *others)
        fresh = (experience.response_mask & (experience.policy_version == step)).float()
        trained = logprobs.detach().masked_fill(~experience.response_mask, 0)
        drawn = of_response(experience, "rollout_logprobs")
        sums = {
            SHARE: fresh.sum(),
            DIFFERENCE: masked_sum((trained - drawn).abs(), fresh),
            KL: masked_sum(kl_estimate(drawn, trained, "k3"), fresh),
        }
        return replace(output, token_sums={**output.token_sums, **sums})

    return replace(loss_function, function=measured) if isinstance(loss_function, SharedLoss) else measured


def summarize(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics with means over fresh tokens in the place of those over all; without them where there are no
    fresh tokens."""
    share = metrics.get(SHARE, 0.0)
    if not share:
        return {name: value for name, value in metrics.items() if name not in METRICS - {SHARE}}
    return {name: value / share if name in (DIFFERENCE, KL) else value for name, value in metrics.items()}
