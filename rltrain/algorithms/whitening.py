"""Advantages over all response tokens of a step: mean 0 and standard deviation 1."""

import math

import torch
from torch import Tensor

from rltrain.algorithms.groups import STD_EPS
from rltrain.data.experience import Experience


def moments(experience: Experience) -> Tensor:
    """[3] fp64 number, sum and sum of squares of the response tokens' advantages; to be added up over ranks."""
    advantages = experience.advantages[experience.response_mask].double()
    return torch.stack([advantages.new_tensor(len(advantages)), advantages.sum(), advantages.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """[tokens] advantages that have mean 0 and standard deviation (n - 1) 1 over the tokens whose moments make up
    `sums`; 0 outside the mask."""
    num_tokens, total, squares = sums.tolist()
    mean = total / max(num_tokens, 1)
    variance = max(squares - num_tokens * mean**2, 0) / max(num_tokens - 1, 1)
    whitened: Tensor = (advantages.double() - mean) / (math.sqrt(variance) + STD_EPS)
    return whitened.masked_fill(~mask, 0).to(advantages.dtype)
