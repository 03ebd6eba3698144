"""Users' losses and advantages, for test_own_functions."""

import numpy as np
import torch
from torch import Tensor


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def clipped_rows(log_probs, old_log_probs, advantages, config, loss_mask=None):
    ratio = (log_probs - old_log_probs).exp()
    bounded = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    return (loss * loss_mask).sum(), {"clip_ratio": 0.0}


def of_others(logits: Tensor) -> Tensor:
    return logits


def of_more(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    return logprobs * temperature


def one_number(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return logprobs.sum()


def rows(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    return log_probs


def raises(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    raise KeyError("no loss")


def centred_over_step(rewards: Tensor, groups: Tensor) -> Tensor:
    assert groups.tolist() == sorted(groups.tolist()), "samples of a prompt are consecutive"
    return rewards - rewards.mean() + 0.001 * groups


def returns_less_mean(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, gamma: float = 0.5, **more: object
) -> tuple[Tensor, Tensor]:
    """Returns discounted rewards still to come, less the step's mean reward. Only `index` distinguishes prompts."""
    to_go = torch.zeros_like(token_level_rewards)
    after = torch.zeros(len(index))
    for column in range(to_go.shape[1] - 1, -1, -1):
        after = token_level_rewards[:, column] + gamma * after
        to_go[:, column] = after
    advantages = (to_go - token_level_rewards.sum(1).mean() + torch.from_numpy(index)[:, None]) * response_mask
    return advantages, to_go


def too_few(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards[1:]
