"""Group sequence policy optimization: one ratio for a whole sequence, clipped as one."""

import torch

from rltrain.algorithms.losses import sample_means
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def gspo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t) with s_t = sg[s] pi_t / sg[pi_t], where s is the geometric mean
    of the sequence's ratios and sg stops gradients: s_t is s in value, and moves with its own token alone.

    Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.3. Where a sequence's tokens have one
    advantage, and under normalization sequence_mean, value and gradient are those of section 4.1, of whole sequences.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    of_sequence = sample_means(tokens.experience, log_ratio)
    ratio = (of_sequence + tokens.logprobs - tokens.logprobs.detach()).exp()
    unclipped = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return Surrogate(torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped})
