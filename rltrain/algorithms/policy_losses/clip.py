"""PPO's clipped surrogate, with DAPO's separate bounds and a second clip where configured."""

import torch

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def clip(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A with c = settings.dual_clip.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; separate bounds as in DAPO (Yu et al.
    2025, equation 10); the second clip as in Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning": without it one token of a large ratio and a negative advantage has no bound.
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
