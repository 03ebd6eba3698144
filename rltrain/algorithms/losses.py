"""What every loss function has in common: its signature, the global counts it divides by, the weight of each token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rltrain.data.experience import Experience

Normalization = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True)
class GlobalCounts:
    """Size of a whole mini-batch, summed over all data-parallel ranks and micro-batches."""

    response_tokens: int
    sequences: int


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's share of the mini-batch's loss and metrics.

    `loss` and `sums` are scalars already divided by the global counts: their sum over all micro-batches and
    data-parallel ranks is the mini-batch's value. `maxima` are combined by maximum. Only `loss` carries a gradient.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[Experience, Tensor, Tensor, GlobalCounts], LossOutput]
"""(micro-batch, logprobs [tokens], entropy [tokens], counts) -> LossOutput.

The micro-batch's tensors are on the device of `logprobs`. `logprobs` and `entropy` stand at the index of the token
they belong to; their values outside the response mask are ignored.
"""


def count(experience: Experience) -> GlobalCounts:
    """The counts of these samples alone; add them up over data-parallel ranks to get global ones."""
    return GlobalCounts(response_tokens=int(experience.response_mask.sum()), sequences=experience.num_samples)


def sample_index(experience: Experience) -> Tensor:
    """[tokens] the sample each packed token belongs to."""
    samples = torch.arange(experience.num_samples, device=experience.lengths.device)
    return torch.repeat_interleave(samples, experience.lengths, output_size=experience.num_tokens)


def response_lengths(experience: Experience) -> Tensor:
    """[samples] number of response tokens."""
    zeros = torch.zeros_like(experience.lengths)
    return zeros.index_add(0, sample_index(experience), experience.response_mask.to(zeros.dtype))


def token_weights(
    experience: Experience, counts: GlobalCounts, normalization: Normalization, max_response_tokens: int
) -> Tensor:
    """[tokens] fp32 factor of each token's loss in the mini-batch's loss; 0 outside the response.

    token_mean: every response token of the mini-batch weighs the same. sequence_mean: every sequence weighs the same,
    and so does every token within one. dr_grpo: every token weighs 1 / (sequences * max_response_tokens), which
    removes the preference for short answers that dividing by a length gives (Liu et al. 2025, "Understanding
    R1-Zero-Like Training"); the paper also leaves advantages undivided by the standard deviation.
    """
    mask = experience.response_mask.float()
    if normalization == "token_mean":
        return mask / max(counts.response_tokens, 1)
    if normalization == "dr_grpo":
        return mask / (max(counts.sequences, 1) * max_response_tokens)
    lengths = response_lengths(experience).clamp(min=1).float()
    return mask / (lengths[sample_index(experience)] * max(counts.sequences, 1))


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Scalar sum of values * weights over tokens of non-zero weight; values elsewhere may be anything, even NaN."""
    return (values.masked_fill(weights == 0, 0) * weights).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar maximum over the mask of values known to be >= 0; 0 for an empty mask."""
    return torch.cat([values.detach()[mask], values.new_zeros(1)]).max()
