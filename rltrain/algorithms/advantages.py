"""Advantages of samples and tokens: compared within groups, estimated from values, whitened; rewards shaped before."""

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

# Samples as members of prompt groups, in which an episode counts once, however many trajectories it has.

STD_EPS = 1e-6
"""Beside a standard deviation that something is divided by."""


@dataclass(frozen=True)
class Groups:
    """The groups of some samples, which need not be contiguous or of equal size.

    A group's size is its number of episodes; a sample weighs as much as its share of its episode. Values are [samples]
    fp64, one for each; so are results, where nothing else is said.
    """

    index: Tensor
    """[samples] int64 the group of each, from 0 on."""
    episodes: Tensor
    """[samples] int64 the episode of each, from 0 on."""

    @classmethod
    def of(cls, group_ids: Tensor, episodes: Tensor | None = None) -> "Groups":
        """`episodes` [samples] int64: samples of equal ones are trajectories of one episode; None: each is one."""
        _, index = torch.unique(group_ids, return_inverse=True)
        if episodes is None:
            return cls(index, torch.arange(len(index), device=index.device))
        return cls(index, torch.unique(episodes, return_inverse=True)[1])

    def select(self, chosen: Tensor) -> "Groups":
        """Those of the samples that are `chosen` [samples] bool."""
        return Groups.of(self.index[chosen], self.episodes[chosen])

    @cached_property
    def num_groups(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0

    @cached_property
    def shares(self) -> Tensor:
        """One over the number of samples of each one's episode."""
        share: Tensor = 1 / self.episodes.bincount().double()[self.episodes]
        return share

    @cached_property
    def sizes(self) -> Tensor:
        """Of each sample's group."""
        return self._sums(torch.ones_like(self.shares)).round()

    def means(self, values: Tensor) -> Tensor:
        """Of each sample's group."""
        return self._sums(values) / self.sizes

    def others_means(self, values: Tensor) -> Tensor:
        """Of the other episodes of each sample's group; the sample's own where there is no other."""
        own = self.episode_means(values)
        return ((self._sums(values) - own) / (self.sizes - 1)).where(self.sizes > 1, own)

    def episode_means(self, values: Tensor) -> Tensor:
        """Of each sample's episode."""
        zeros = values.new_zeros(len(self.index))
        return zeros.index_add(0, self.episodes, values * self.shares)[self.episodes]

    def are_equal(self, values: Tensor) -> Tensor:
        """[samples] bool: whether all values of the sample's group are the same."""
        zeros = values.new_zeros(self.num_groups)
        largest = zeros.scatter_reduce(0, self.index, values, "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, self.index, values, "amin", include_self=False)
        return (largest == smallest)[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Less the group's mean: exactly 0 where all of a group are equal."""
        return (values - self.means(values)).masked_fill(self.are_equal(values), 0)

    def deviations(self, values: Tensor) -> Tensor:
        """Of each sample's group the standard deviation of a sample (n - 1); 0 of a group of one."""
        variance = self._sums(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)
        return variance.sqrt()

    def standardized(self, values: Tensor) -> Tensor:
        """Centred and divided by the group's standard deviation: exactly 0 where all of a group are equal."""
        return self.over_deviations(self.centred(values), values)

    def over_deviations(self, values: Tensor, of: Tensor) -> Tensor:
        """`values` divided by the group's standard deviation of the values `of`."""
        return values / (self.deviations(of) + STD_EPS)

    def _sums(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(self.num_groups)
        return zeros.index_add(0, self.index, values * self.shares)[self.index]


# Advantages of whole samples, by which each of their response tokens is trained.

Estimator = Callable[[Tensor, Groups], Tensor]
"""([members, ...] fp64 values, [members] groups) -> [members] fp64 advantages."""


def with_sample_advantages(
    experience: Experience, estimator: Estimator, *, of: str = "rewards", token_rewards: Tensor | None = None
) -> Experience:
    """`experience` with its samples' advantages on every response token, 0 elsewhere.

    The estimator gets the field `of`; every group must be whole. Of `token_rewards` [tokens], such as a KL penalty,
    a sample gets the sum beside its reward: with one advantage per sample, a penalty on every token and its sum on the
    sample are the same. A sample without a token in the response mask is no member of its group.
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
# A sample's reward comes with its last response token, or with those of its turns. After its end there is nothing: a
# response that was cut by the token limit ends like any other, as is usual in training language models, so no value is
# put in the place of what it lacks.


def with_gae(experience: Experience, token_rewards: Tensor | None = None, *, gamma: float, lam: float) -> Experience:
    """`experience` with advantages and returns (advantage + value) on response tokens, 0 elsewhere.

    Needs rewards and values; `token_rewards` as in `rewards_at_tokens`.
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
    """`experience` with, as advantage of each response token, sum over k of gamma^k times the reward k tokens later.

    Needs rewards; `token_rewards` as in `rewards_at_tokens`.
    """
    positions, samples, rewards = rewards_at_tokens(experience, token_rewards)
    to_go = _gae(rewards, torch.zeros_like(rewards), samples, gamma, 1.0)
    per_token = torch.zeros(experience.num_tokens, dtype=experience.rewards.dtype)
    return experience.with_fields(advantages=per_token.index_put((positions,), to_go.to(per_token.dtype)))


def rewards_at_tokens(experience: Experience, token_rewards: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of the n response tokens where they stand, which samples they are of, and their rewards, fp64.

    `token_rewards` [tokens] come on top of the samples' rewards, such as a KL penalty. What of a sample's reward came
    with its turns (turn_rewards, where they are there) stands at the ends of these, the rest at its last token. Tokens
    out of the response mask are no steps: the tokens around them follow one another.
    """
    positions = torch.nonzero(experience.response_mask).flatten()
    samples = sample_index(experience)[positions]
    zeros = torch.zeros(len(positions), dtype=torch.float64)
    rewards = zeros if token_rewards is None else token_rewards[positions].double()
    at_turns = experience.turn_rewards[positions].double() if experience.has("turn_rewards") else zeros
    at_end = experience.rewards.double() - at_turns.new_zeros(experience.num_samples).index_add(0, samples, at_turns)
    return positions, samples, rewards + at_turns + at_end[samples] * _is_last(samples)


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


# Advantages over all response tokens of a step: mean 0 and standard deviation 1.


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


# What a sample adds to the best of k samples of its group.


def gains_of_best(rewards: Tensor, groups: Groups, k: int) -> Tensor:
    """[samples] fp64 mean over the sets of k episodes of its group that hold the sample's, of the set's best reward
    less that of the others.

    Trajectories of an episode share its mean reward and its gain. Of a group of fewer episodes all are taken; one
    that is alone has nothing to be compared with: 0.
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
    """[size, size] fp64 for places in ascending order: the chance that place j is the second best of a set of k places
    that holds place i, and i its best."""
    if k < 2:  # noqa: PLR2004 - a set of one has no second
        return torch.zeros(size, size, dtype=torch.float64)
    all_sets = comb(size - 1, k - 1)
    rows = [[comb(j, k - 2) / all_sets if j < i else 0.0 for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


# Rewards less those of the greedy responses to the same prompts.


def less_greedy_rewards(experience: Experience, greedy: Tensor) -> Experience:
    """The samples that are not `greedy` [samples] bool, their rewards less the mean of the greedy ones' of their group.

    ValueError where a group has none.
    """
    groups, index = torch.unique(experience.group_ids, return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64)
    counts = zeros.index_add(0, index[greedy], torch.ones_like(zeros[index[greedy]]))
    if (counts == 0).any():
        raise ValueError(f"no greedy sample in the groups {groups[counts == 0].tolist()}; expected one in each")
    baselines = zeros.index_add(0, index[greedy], experience.rewards[greedy].double()) / counts
    rewards = (experience.rewards.double() - baselines[index]).to(experience.rewards.dtype)
    return experience.with_fields(rewards=rewards).select(torch.nonzero(~greedy).flatten())


# Packed tokens as other trainers have them: a row for each sample, of its response from the first token on.


@dataclass(frozen=True)
class Rectangle:
    """What was observed between the turns of a response stands in the rows as well, out of the mask."""

    tokens: Tensor
    """[n] the tokens that are in it."""
    places: Tensor
    """[n] where each stands, row by row."""
    shape: tuple[int, int]
    """Samples, and tokens of the longest response."""

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
        """[samples, longest] of `values` [tokens], 0 behind what is there. Gradients flow."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), values[self.tokens]).view(self.shape)

    def packed(self, rows: Tensor, num_tokens: int) -> Tensor:
        """[tokens] what `rows` [samples, longest] hold of each token, 0 of those that are not in it."""
        return rows.new_zeros(num_tokens).index_put((self.tokens,), rows.reshape(-1)[self.places])


# Responses that are too long: a penalty that grows with their length, and none of those that were cut in the loss.
#
# Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", section 3.4.


def overlong_penalties(experience: Experience, settings: schema.OverlongPenalty, max_response_tokens: int) -> Tensor:
    """[samples] fp64 at most 0, to be added to the rewards (equation 13):

        0                                            where |y| <= L - buffer
        factor ((L - buffer) - |y|) / buffer         where L - buffer < |y| <= L

    with L the most tokens that a response may have, and |y| the tokens from the first that was drawn on: what was
    observed between turns takes room too. 0 where nothing was drawn.
    """
    lengths = lengths_from_first_drawn(experience).double()
    excess = (lengths - (max_response_tokens - settings.buffer_tokens)).clamp(min=0, max=settings.buffer_tokens)
    return -settings.factor * excess / settings.buffer_tokens


def lengths_from_first_drawn(experience: Experience) -> Tensor:
    """[samples] int64 tokens from the first response token on; 0 where there is none."""
    num_before = torch.zeros(experience.num_samples, dtype=torch.int64)
    drawn = torch.zeros(experience.num_tokens + 1, dtype=torch.int64)
    drawn[1:] = experience.response_mask.cumsum(0)
    starts = experience.offsets()[:-1]
    index = sample_index(experience)
    is_before = drawn[1:] == drawn[starts][index]
    num_before = num_before.index_add(0, index, is_before.long())
    return experience.lengths - num_before


def without_truncated(experience: Experience) -> Experience:
    """`experience` with nothing of truncated samples in the response mask.

    To be called once advantages are made, in which they count: they are compared with, and not trained on.
    """
    cut = experience.truncated[sample_index(experience)]
    return experience.with_fields(response_mask=experience.response_mask & ~cut)


def num_truncated(experience: Experience) -> int:
    """Truncated samples with a response."""
    return int((experience.truncated & (response_lengths(experience) > 0)).sum())


# The distance from the reference as a reward: what it takes off each token, and a coefficient that adapts.

MAX_ERROR = 0.2
"""By which a KL counts at most as too large or too small, relative to the target."""


def response_kl(experience: Experience, kl: schema.Kl) -> Tensor:
    """[tokens] the KL estimate of response tokens, 0 elsewhere.

    Needs reference_logprobs; the actor's own log-probs are actor_logprobs where present, else rollout_logprobs.
    """
    assert kl.estimator != "full", "it is no estimate of a drawn token"
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    return kl_estimate(drawn, experience.reference_logprobs, kl.estimator).masked_fill(~experience.response_mask, 0)


def mean_kl_sums(experience: Experience, token_kl: Tensor) -> Tensor:
    """[2] fp64 sum over responses of the mean of `token_kl` over their tokens, and their number; to be added up over
    ranks and parts of a step. Samples without a response count nowhere."""
    lengths = response_lengths(experience).double()
    of_samples = torch.zeros_like(lengths).index_add(0, sample_index(experience), token_kl.double())
    num_responses = (lengths > 0).sum()
    return torch.stack([(of_samples / lengths.clamp(min=1)).sum(), num_responses.double()])


@dataclass
class KlCoefficient:
    """That of the penalty, from step to step. With loss.kl.adaptive it follows the distance that was measured
    (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2):

        e = clip(KL / target - 1, -0.2, 0.2)
        coef becomes coef (1 + e n / horizon)        after a step of n responses

    KL is the mean over responses of the mean over their tokens; in the paper it is the sum over the tokens.
    """

    settings: schema.Kl
    coef: float

    def after(self, measured_kl: float, num_responses: float) -> None:
        """A step with these; nothing changes without responses."""
        adaptive = self.settings.adaptive
        if adaptive is not None and num_responses:
            error = min(max(measured_kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= max(1 + error * num_responses / adaptive.horizon, 0.0)
