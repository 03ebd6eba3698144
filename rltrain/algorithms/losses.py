"""What every loss function has in common: sums that are divided once, and what each token counts for in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rltrain.data.experience import Experience

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
