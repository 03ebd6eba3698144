"""Soft adaptive policy optimization: a smooth gate in the place of the clip."""

import torch

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def sapo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-4 / tau sigmoid(tau (r - 1)) A with tau = tau_pos where A > 0, else tau_neg. At r = 1 its gradient is that of
    -r A, and it fades with the distance from there.

    Gao et al. 2025, "Soft Adaptive Policy Optimization", equations 5 and 6.
    """
    positive = tokens.advantages > 0
    tau = torch.where(positive, settings.sapo.tau_pos, settings.sapo.tau_neg).to(tokens.ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
    return Surrogate(-gate * tokens.advantages)
