"""Generalized advantage estimation per token (Schulman et al. 2016, equations 11 to 16), and discounted returns.

A sample's reward comes with its last response token, or with those of its turns. After its end there is nothing: a
response that was cut by the token limit ends like any other, as is usual in training language models, so no value is
put in the place of what it lacks.
"""

import torch
from torch import Tensor

from rltrain.algorithms.losses import sample_index
from rltrain.data.experience import Experience


def with_gae(experience: Experience, token_rewards: Tensor | None = None, *, gamma: float, lam: float) -> Experience:
    """`experience` with advantages and returns (advantage + value) on response tokens, 0 elsewhere.

    Needs rewards and values; `token_rewards` as in `rewards_at_tokens`.
    """
    positions = torch.nonzero(experience.response_mask).flatten()
    samples = sample_index(experience)[positions]
    values = experience.values[positions].double()
    advantages = _gae(rewards_at_tokens(experience, positions, samples, token_rewards), values, samples, gamma, lam)
    per_token = torch.zeros_like(experience.values)
    return experience.with_fields(
        advantages=per_token.index_put((positions,), advantages.to(per_token.dtype)),
        returns=per_token.index_put((positions,), (advantages + values).to(per_token.dtype)),
    )


def with_returns_to_go(experience: Experience, token_rewards: Tensor | None = None, *, gamma: float) -> Experience:
    """`experience` with, as advantage of each response token, sum over k of gamma^k times the reward k tokens later.

    Needs rewards; `token_rewards` as in `rewards_at_tokens`.
    """
    positions = torch.nonzero(experience.response_mask).flatten()
    samples = sample_index(experience)[positions]
    rewards = rewards_at_tokens(experience, positions, samples, token_rewards)
    to_go = _gae(rewards, torch.zeros_like(rewards), samples, gamma, 1.0)
    per_token = torch.zeros(experience.num_tokens, dtype=experience.rewards.dtype)
    return experience.with_fields(advantages=per_token.index_put((positions,), to_go.to(per_token.dtype)))


def rewards_at_tokens(
    experience: Experience, positions: Tensor, samples: Tensor, token_rewards: Tensor | None
) -> Tensor:
    """[n] fp64 of the response tokens at `positions`, which are of `samples` (both [n]).

    `token_rewards` [tokens] come on top of the samples' rewards, such as a KL penalty. What of a sample's reward came
    with its turns (turn_rewards, where they are there) stands at the ends of these, the rest at its last token. Tokens
    out of the response mask are no steps: the tokens around them follow one another.
    """
    zeros = torch.zeros(len(positions), dtype=torch.float64)
    rewards = zeros if token_rewards is None else token_rewards[positions].double()
    at_turns = experience.turn_rewards[positions].double() if experience.has("turn_rewards") else zeros
    at_end = experience.rewards.double() - at_turns.new_zeros(experience.num_samples).index_add(0, samples, at_turns)
    return rewards + at_turns + at_end[samples] * _is_last(samples)


def _is_last(samples: Tensor) -> Tensor:
    """[n] bool: whether the next token belongs to another sample."""
    return torch.cat([samples[1:] != samples[:-1], samples.new_ones(min(len(samples), 1), dtype=torch.bool)])


def _gae(rewards: Tensor, values: Tensor, samples: Tensor, gamma: float, lam: float) -> Tensor:
    """[n] sum over k of (gamma lam)^k delta[t + k] within t's sample, delta = reward + gamma next value - value.

    All tokens of all samples at once: when the window of the sums is doubled, each sum gains the one that starts where
    it ended. As many rounds as the longest response has binary digits.
    """
    next_values = values.roll(-1).masked_fill(_is_last(samples), 0)
    advantages = rewards + gamma * next_values - values
    longest = int(samples.bincount().max()) if len(samples) else 0
    window, discount = 1, gamma * lam
    while window < longest:
        together = samples[window:] == samples[:-window]
        following = discount * advantages[window:].masked_fill(~together, 0)
        advantages = torch.cat([advantages[:-window] + following, advantages[-window:]])
        window, discount = 2 * window, discount**2
    return advantages
