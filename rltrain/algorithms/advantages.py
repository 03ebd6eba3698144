"""Advantages per sample and per token: comparison within groups, GAE, whitening, and penalties in the reward."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import comb

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import response_lengths, sample_index
from rltrain.config import schema
from rltrain.data.experience import SIBLINGS_APART, Experience

# Prompt groups. An episode counts once, even with several trajectories.

STD_EPS = 1e-6
"""Added to a standard deviation before a division."""


@dataclass(frozen=True)
class Groups:
    """The group and the episode of each sample. Groups may have any order and different sizes.

    A group's size is its number of episodes. A sample weighs 1 / (samples of its episode). Values are fp64 [samples],
    and so are the results unless stated otherwise.
    """

    index: Tensor
    """Group of each sample, int64 [samples], from 0."""
    episodes: Tensor
    """Episode of each sample, int64 [samples], from 0."""

    @classmethod
    def of(cls, group_ids: Tensor, episodes: Tensor | None = None) -> "Groups":
        """Builds the groups. Samples with equal `episodes`, int64 [samples], are trajectories of one episode.

        With None, each sample is an episode.
        """
        _, index = torch.unique(group_ids, return_inverse=True)
        if episodes is None:
            return cls(index, torch.arange(len(index), device=index.device))
        return cls(index, torch.unique(episodes, return_inverse=True)[1])

    def select(self, chosen: Tensor) -> "Groups":
        """Returns the groups of the chosen samples. `chosen` is bool [samples]."""
        return Groups.of(self.index[chosen], self.episodes[chosen])

    @cached_property
    def num_groups(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0

    @cached_property
    def shares(self) -> Tensor:
        """Weight of each sample: 1 / (number of samples in its episode)."""
        share: Tensor = 1 / self.episodes.bincount().double()[self.episodes]
        return share

    @cached_property
    def sizes(self) -> Tensor:
        """Number of episodes in each sample's group."""
        return self._sums(torch.ones_like(self.shares)).round()

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean of each sample's group."""
        return self._sums(values) / self.sizes

    def others_means(self, values: Tensor) -> Tensor:
        """Returns the mean over the other episodes of each sample's group, or the sample's own episode mean if there
        are none."""
        own = self.episode_means(values)
        return ((self._sums(values) - own) / (self.sizes - 1)).where(self.sizes > 1, own)

    def episode_means(self, values: Tensor) -> Tensor:
        """Returns the mean of each sample's episode."""
        zeros = values.new_zeros(len(self.index))
        return zeros.index_add(0, self.episodes, values * self.shares)[self.episodes]

    def are_equal(self, values: Tensor) -> Tensor:
        """Returns whether all values of a sample's group are equal, bool [samples]."""
        zeros = values.new_zeros(self.num_groups)
        largest = zeros.scatter_reduce(0, self.index, values, "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, self.index, values, "amin", include_self=False)
        return (largest == smallest)[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Returns the values minus their group's mean: exactly 0 if all values of the group are equal."""
        return (values - self.means(values)).masked_fill(self.are_equal(values), 0)

    def deviations(self, values: Tensor) -> Tensor:
        """Returns the standard deviation (n - 1) of each sample's group. It is 0 for a group of one."""
        variance = self._sums(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)
        return variance.sqrt()

    def standardized(self, values: Tensor) -> Tensor:
        """Returns centred values divided by their group's standard deviation: exactly 0 if all values are equal."""
        return self.over_deviations(self.centred(values), values)

    def over_deviations(self, values: Tensor, of: Tensor) -> Tensor:
        """Returns `values` divided by the group's standard deviation of `of`."""
        return values / (self.deviations(of) + STD_EPS)

    def _sums(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(self.num_groups)
        return zeros.index_add(0, self.index, values * self.shares)[self.index]


# One advantage per sample, copied to each of its response tokens.

Estimator = Callable[[Tensor, Groups], Tensor]
"""(values, fp64 [members, ...], groups of the members) -> advantages, fp64 [members]."""


def with_sample_advantages(
    experience: Experience, estimator: Estimator, *, of: str = "rewards", token_rewards: Tensor | None = None
) -> Experience:
    """Returns `experience` with each sample's advantage on all its response tokens, and 0 on the other tokens.

    The estimator gets the field `of`. Every group must be whole. `token_rewards` [tokens], for example a KL penalty,
    are summed per sample and added to its value. With one advantage per sample this equals a penalty on every token.
    Samples without a token in the response mask are not members of their group.
    """
    values = getattr(experience, of).double()
    index = sample_index(experience)
    if token_rewards is not None:
        values = values.index_add(0, index, token_rewards.double().masked_fill(~experience.response_mask, 0))
    members = response_lengths(experience) > 0
    episodes = experience.sample_ids[members] % SIBLINGS_APART if experience.has("sample_ids") else None
    per_sample = torch.zeros(experience.num_samples, dtype=torch.float64)
    if members.any():
        per_sample[members] = estimator(values[members], Groups.of(experience.group_ids[members], episodes))
    per_token = per_sample[index].masked_fill(~experience.response_mask, 0)
    return experience.with_fields(advantages=per_token.to(experience.rewards.dtype))


# Generalized advantage estimation per token (Schulman et al. 2016, equations 11 to 16), and discounted returns.
#
# A sample's reward is at its last response token, or at the ends of its turns. Every response is a finished episode: as
# usual for language models, a truncated response is not bootstrapped with a value.


def with_gae(experience: Experience, token_rewards: Tensor | None = None, *, gamma: float, lam: float) -> Experience:
    """Returns `experience` with advantages and returns (advantage + value) on response tokens, and 0 on the others.

    Needs rewards and values. `token_rewards` are those of `rewards_at_tokens`.
    """
    positions, samples, rewards = rewards_at_tokens(experience, token_rewards)
    values = experience.values[positions].double()
    advantages = _gae(rewards, values, samples, gamma, lam)
    per_token = torch.zeros_like(experience.values)
    return experience.with_fields(
        advantages=per_token.index_put((positions,), advantages.to(per_token.dtype)),
        returns=per_token.index_put((positions,), (advantages + values).to(per_token.dtype)),
    )


def with_returns_to_go(experience: Experience, token_rewards: Tensor | None = None, *, gamma: float) -> Experience:
    """Returns `experience` with discounted returns as advantages: the sum over k of gamma^k times the reward k tokens
    later.

    Needs rewards. `token_rewards` are those of `rewards_at_tokens`.
    """
    positions, samples, rewards = rewards_at_tokens(experience, token_rewards)
    to_go = _gae(rewards, torch.zeros_like(rewards), samples, gamma, 1.0)
    per_token = torch.zeros(experience.num_tokens, dtype=experience.rewards.dtype)
    return experience.with_fields(advantages=per_token.index_put((positions,), to_go.to(per_token.dtype)))


def rewards_at_tokens(experience: Experience, token_rewards: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns positions, sample indices and fp64 rewards of the n response tokens, shape [n] each.

    `token_rewards` [tokens], for example a KL penalty, are added. Rewards of turns (turn_rewards, if present) are at
    the ends of the turns. The rest of a sample's reward is at its last response token. Tokens outside the response mask
    are skipped, so the response tokens around them are neighbours.
    """
    positions = torch.nonzero(experience.response_mask).flatten()
    samples = sample_index(experience)[positions]
    zeros = torch.zeros(len(positions), dtype=torch.float64)
    rewards = zeros if token_rewards is None else token_rewards[positions].double()
    at_turns = experience.turn_rewards[positions].double() if experience.has("turn_rewards") else zeros
    at_end = experience.rewards.double() - at_turns.new_zeros(experience.num_samples).index_add(0, samples, at_turns)
    return positions, samples, rewards + at_turns + at_end[samples] * _is_last(samples)


def _is_last(samples: Tensor) -> Tensor:
    """Returns a bool mask [n] of the last token of each sample."""
    return torch.cat([samples[1:] != samples[:-1], samples.new_ones(min(len(samples), 1), dtype=torch.bool)])


def _gae(rewards: Tensor, values: Tensor, samples: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns the sum over k of (gamma lam)^k delta[t + k] within t's sample, fp64 [n].

    delta is reward + gamma * next value - value. All tokens of all samples are summed at once by doubling the window:
    each sum gains the sum of the next window. The number of rounds is the number of binary digits of the longest
    response.
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


# Whitening over all response tokens of a step.


def moments(experience: Experience) -> Tensor:
    """Returns count, sum and sum of squares of the response tokens' advantages, fp64 [3]. The caller sums them over
    ranks."""
    advantages = experience.advantages[experience.response_mask].double()
    return torch.stack([advantages.new_tensor(len(advantages)), advantages.sum(), advantages.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Returns advantages [tokens] with mean 0 and standard deviation (n - 1) of 1, and 0 outside the mask.

    `sums` are the `moments` over all tokens of the step.
    """
    num_tokens, total, squares = sums.tolist()
    mean = total / max(num_tokens, 1)
    variance = max(squares - num_tokens * mean**2, 0) / max(num_tokens - 1, 1)
    whitened: Tensor = (advantages.double() - mean) / (math.sqrt(variance) + STD_EPS)
    return whitened.masked_fill(~mask, 0).to(advantages.dtype)


# The gain of a sample for the best of k samples of its group.


def gains_of_best(rewards: Tensor, groups: Groups, k: int) -> Tensor:
    """Returns each sample's mean gain over all sets of k episodes of its group that contain its own, fp64 [samples].

    The gain is the best reward of the set minus the best reward of the others in it. Trajectories of an episode share
    its mean reward and its gain. A group with fewer than k episodes forms a single set. The only episode of a group
    gains 0.
    """
    of_episodes = groups.episode_means(rewards)
    gains = torch.zeros_like(of_episodes)
    for group in range(groups.num_groups):
        samples = torch.nonzero(groups.index == group).flatten()
        episodes, place = torch.unique(groups.episodes[samples], return_inverse=True)
        values = of_episodes.new_zeros(len(episodes)).index_put((place,), of_episodes[samples])
        ordered, order = values.sort()
        chances = second_chances(len(episodes), min(k, len(episodes)))
        of_ordered = (chances * (ordered[:, None] - ordered)).sum(1)
        gains[samples] = torch.zeros_like(values).index_put((order,), of_ordered)[place]
    return gains


@cache
def second_chances(size: int, k: int) -> Tensor:
    """Returns the probability that place i is the best and place j the second best of a random set of k places with i.

    Places are in ascending order of reward. fp64, shape [i, j] = [size, size].
    """
    if k < 2:  # noqa: PLR2004 - a set of one has no second
        return torch.zeros(size, size, dtype=torch.float64)
    all_sets = comb(size - 1, k - 1)
    rows = [[comb(j, k - 2) / all_sets if j < i else 0.0 for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


# Rewards relative to the greedy response of the same prompt.


def less_greedy_rewards(experience: Experience, greedy: Tensor) -> Experience:
    """Returns the samples outside `greedy` (bool [samples]), each reward minus the mean reward of its group's greedy
    samples.

    Raises ValueError if a group has no greedy sample.
    """
    groups, index = torch.unique(experience.group_ids, return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64)
    counts = zeros.index_add(0, index[greedy], torch.ones_like(zeros[index[greedy]]))
    if (counts == 0).any():
        raise ValueError(f"no greedy sample in the groups {groups[counts == 0].tolist()}; expected one in each")
    baselines = zeros.index_add(0, index[greedy], experience.rewards[greedy].double()) / counts
    rewards = (experience.rewards.double() - baselines[index]).to(experience.rewards.dtype)
    return experience.with_fields(rewards=rewards).select(torch.nonzero(~greedy).flatten())


# Packed tokens in the padded form of other trainers: a row per sample, beginning with its first response token.


@dataclass(frozen=True)
class Rectangle:
    """The index of packed response tokens in a padded tensor. Observations between the turns are included."""

    tokens: Tensor
    """Packed indices of the included tokens, shape [n]."""
    places: Tensor
    """Flat indices of these tokens in the padded tensor, shape [n]."""
    shape: tuple[int, int]
    """Number of samples, and number of tokens of the longest response."""

    @classmethod
    def of(cls, experience: Experience) -> "Rectangle":
        samples = sample_index(experience)
        within = torch.arange(len(samples), device=samples.device) - experience.offsets()[:-1][samples]
        drawn = experience.response_mask
        longest = int(experience.lengths.max()) if experience.num_samples else 0
        firsts = experience.lengths.new_full((experience.num_samples,), longest)
        firsts = firsts.scatter_reduce(0, samples[drawn], within[drawn], "amin")
        ends = torch.zeros_like(firsts).scatter_reduce(0, samples[drawn], within[drawn] + 1, "amax")
        tokens = torch.nonzero((within >= firsts[samples]) & (within < ends[samples])).flatten()
        width = int((ends - firsts).clamp(min=0).max()) if experience.num_samples else 0
        rows = samples[tokens]
        places = rows * width + within[tokens] - firsts[rows]
        return cls(tokens, places, (experience.num_samples, width))

    def padded(self, values: Tensor) -> Tensor:
        """Returns `values` [tokens] as [samples, longest], padded with 0 at the end. Gradients flow."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), values[self.tokens]).view(self.shape)

    def packed(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Returns the values of `rows` [samples, longest] as [num_tokens], with 0 for all other tokens."""
        return rows.new_zeros(num_tokens).index_put((self.tokens,), rows.reshape(-1)[self.places])


# Long responses: a length penalty, and the exclusion of truncated responses from the loss.
#
# Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.4.


def overlong_penalties(experience: Experience, settings: schema.OverlongPenalty, max_response_tokens: int) -> Tensor:
    """Returns a penalty per sample, fp64 [samples], at most 0. The caller adds it to the rewards (equation 13):

        0                                            if |y| <= L - buffer
        factor ((L - buffer) - |y|) / buffer         if L - buffer < |y| <= L

    L is `max_response_tokens`. |y| counts the tokens from the first response token on, including observations between
    turns. The penalty is 0 for a sample without response tokens.
    """
    lengths = lengths_from_first_drawn(experience).double()
    excess = (lengths - (max_response_tokens - settings.buffer_tokens)).clamp(min=0, max=settings.buffer_tokens)
    return -settings.factor * excess / settings.buffer_tokens


def lengths_from_first_drawn(experience: Experience) -> Tensor:
    """Returns the number of tokens from the first response token on, int64 [samples]: 0 without response tokens."""
    num_before = torch.zeros(experience.num_samples, dtype=torch.int64)
    drawn = torch.zeros(experience.num_tokens + 1, dtype=torch.int64)
    drawn[1:] = experience.response_mask.cumsum(0)
    starts = experience.offsets()[:-1]
    index = sample_index(experience)
    is_before = drawn[1:] == drawn[starts][index]
    num_before = num_before.index_add(0, index, is_before.long())
    return experience.lengths - num_before


def without_truncated(experience: Experience) -> Experience:
    """Returns `experience` with truncated samples removed from the response mask.

    Call it after the advantages are made: truncated samples count in comparisons but are not trained on.
    """
    cut = experience.truncated[sample_index(experience)]
    return experience.with_fields(response_mask=experience.response_mask & ~cut)


def num_truncated(experience: Experience) -> int:
    """Returns the number of truncated samples with a response."""
    return int((experience.truncated & (response_lengths(experience) > 0)).sum())


# The KL penalty in the reward: its value per token, and an adaptive coefficient.

MAX_ERROR = 0.2
"""Limit of the KL's relative error in one update of the coefficient."""


def response_kl(experience: Experience, kl: schema.Kl) -> Tensor:
    """Returns the KL estimate of response tokens, and 0 for the others, shape [tokens].

    Needs reference_logprobs. The actor's log-probs are actor_logprobs if present, else rollout_logprobs.
    """
    assert kl.estimator != "full", "it is no estimate of a drawn token"
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    return kl_estimate(drawn, experience.reference_logprobs, kl.estimator).masked_fill(~experience.response_mask, 0)


def mean_kl_sums(experience: Experience, token_kl: Tensor) -> Tensor:
    """Returns the sum over responses of the mean `token_kl` of their tokens, and the number of responses, fp64 [2].

    The caller sums them over ranks and parts of a step. Samples without a response do not count.
    """
    lengths = response_lengths(experience).double()
    of_samples = torch.zeros_like(lengths).index_add(0, sample_index(experience), token_kl.double())
    num_responses = (lengths > 0).sum()
    return torch.stack([(of_samples / lengths.clamp(min=1)).sum(), num_responses.double()])


@dataclass
class KlCoefficient:
    """The coefficient of the KL penalty. With loss.kl.adaptive it changes after every step.

    It follows Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2:

        e = clip(KL / target - 1, -0.2, 0.2)
        coef becomes coef (1 + e n / horizon)        after a step of n responses

    KL is the mean over responses of the mean over their tokens. In the paper it is the sum over the tokens.
    """

    settings: schema.Kl
    coef: float

    def after(self, measured_kl: float, num_responses: float) -> None:
        """Updates the coefficient after a step. Nothing changes if there were no responses."""
        adaptive = self.settings.adaptive
        if adaptive is not None and num_responses:
            error = min(max(measured_kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= max(1 + error * num_responses / adaptive.horizon, 0.0)
