"""Pairs of samples of which one was preferred: what is compared, and what is reported of it."""

import torch
from torch import Tensor

from rltrain.algorithms.losses import sample_index
from rltrain.data.experience import Experience


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
