"""Tests of group and critic advantages, and of the penalties for KL and length."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import (
    STD_EPS,
    Groups,
    KlCoefficient,
    mean_kl_sums,
    moments,
    overlong_penalties,
    response_kl,
    whiten,
    with_gae,
)
from rltrain.algorithms.algorithm import Algorithm, Replicas
from rltrain.algorithms.registry import algorithm_of
from rltrain.config import schema
from rltrain.config.schema import OverlongPenalty
from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.roles.actor import AdvantageEstimation
from tests.support.packed_experience import packed_experience
from tests.support.schedule_configs import make_config

FUNCTIONS = {"functions": [{"function": "a:f", "weight": 0.5}, {"function": "a:g", "weight": -2.0}]}
WEIGHTS = (0.5, -2.0)


@dataclass(frozen=True)
class Row:
    """A sample. `mask` marks its trained tokens."""

    group: int
    episode: int
    mask: tuple[bool, ...]
    reward: float
    parts: tuple[float, float] = (0.0, 0.0)

    @property
    def is_member(self) -> bool:
        return any(self.mask)


def of(name: str, **advantages: object) -> Algorithm:
    return algorithm_of(make_config(algorithm=name, advantages=advantages, reward=FUNCTIONS if name == "gdpo" else {}))


def packed(rows: Sequence[Row]) -> Experience:
    """Packs the rows. Further trajectories of an episode get ids at distances of SIBLINGS_APART."""
    seen = Counter[int]()
    ids = []
    for row in rows:
        ids.append(row.episode + seen[row.episode] * SIBLINGS_APART)
        seen[row.episode] += 1
    num_tokens = sum(len(row.mask) for row in rows)
    return Experience(
        sample_ids=torch.tensor(ids),
        group_ids=torch.tensor([row.group for row in rows]),
        lengths=torch.tensor([len(row.mask) for row in rows]),
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        response_mask=torch.tensor([inside for row in rows for inside in row.mask], dtype=torch.bool),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        reward_parts=torch.tensor([row.parts for row in rows], dtype=torch.float64),
    )


REWARDS = st.sampled_from([0.0, 1.0, 0.25, 0.5, 2.0, 1 / 3])
PARTS = st.tuples(REWARDS | st.just(math.nan), REWARDS)
MASKS = st.lists(st.booleans(), min_size=1, max_size=4).map(lambda mask: (False, *mask))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Draws one to three groups of one to five episodes of one to three trajectories each."""
    result = []
    numbers = itertools.count()
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 5))):
            episode = next(numbers)
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
                result.append(Row(7 * group, episode, draw(MASKS), draw(REWARDS), draw(PARTS)))
    return result


def in_groups(members: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in members if row.group == group] for group in {row.group for row in members}]


def shares(group: Sequence[Row]) -> list[float]:
    return [1 / sum(other.episode == row.episode for other in group) for row in group]


def episode_rewards(group: Sequence[Row]) -> dict[int, float]:
    return {
        row.episode: statistics.fmean(other.reward for other in group if other.episode == row.episode) for row in group
    }


def plain_mean(group: Sequence[Row]) -> float:
    return statistics.fmean(episode_rewards(group).values())


def plain_deviation(group: Sequence[Row]) -> float:
    mean, num_episodes = plain_mean(group), len(episode_rewards(group))
    squares = sum(share * (row.reward - mean) ** 2 for row, share in zip(group, shares(group), strict=True))
    return math.sqrt(squares / max(num_episodes - 1, 1))


def plain_grpo(row: Row, group: Sequence[Row]) -> float:
    return (row.reward - plain_mean(group)) / (plain_deviation(group) + STD_EPS)


def plain_centred(row: Row, group: Sequence[Row]) -> float:
    return row.reward - plain_mean(group)


def plain_rloo(row: Row, group: Sequence[Row]) -> float:
    others = [reward for episode, reward in episode_rewards(group).items() if episode != row.episode]
    baseline = statistics.fmean(others) if others else episode_rewards(group)[row.episode]
    return row.reward - baseline


def plain_maxrl(row: Row, group: Sequence[Row]) -> float:
    mean = plain_mean(group)
    return (row.reward - mean) / mean if mean else 0.0


def plain_pass_at_k(row: Row, group: Sequence[Row], k: int = 3) -> float:
    rewards = episode_rewards(group)
    sets = [chosen for chosen in itertools.combinations(rewards, min(k, len(rewards))) if row.episode in chosen]
    if len(rewards) == 1:
        return 0.0
    best = [max(rewards[e] for e in chosen) for chosen in sets]
    without = [max(rewards[e] for e in chosen if e != row.episode) for chosen in sets]
    return statistics.fmean(a - b for a, b in zip(best, without, strict=True))


def plain_gdpo(row: Row, group: Sequence[Row]) -> float:
    total = 0.0
    for number, weight in enumerate(WEIGHTS):
        known = [
            Row(other.group, other.episode, other.mask, other.parts[number])
            for other in group
            if not math.isnan(other.parts[number])
        ]
        if not math.isnan(row.parts[number]):
            total += weight * plain_grpo(Row(row.group, row.episode, row.mask, row.parts[number]), known)
    return total


def per_token(samples: Sequence[Row], plain: object) -> list[float]:
    members = [row for row in samples if row.is_member]
    of_groups = {group[0].group: group for group in in_groups(members)}
    return [
        plain(row, of_groups[row.group]) if inside else 0.0  # type: ignore[operator]
        for row in samples
        for inside in row.mask
    ]


def whitened(values: list[float], samples: Sequence[Row]) -> list[float]:
    mask = [inside for row in samples for inside in row.mask]
    chosen = [value for value, inside in zip(values, mask, strict=True) if inside]
    mean = statistics.fmean(chosen) if chosen else 0.0
    deviation = statistics.stdev(chosen) if len(chosen) > 1 else 0.0
    return [(v - mean) / (deviation + STD_EPS) if inside else 0.0 for v, inside in zip(values, mask, strict=True)]


def assert_close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(rows())
def test_of_one_prompt_s_responses(samples: list[Row]) -> None:
    experience = packed(samples)
    plain = {
        "grpo": plain_grpo,
        "rloo": plain_rloo,
        "reinforce_plus_plus_baseline": plain_centred,
        "maxrl": plain_maxrl,
        "gdpo": plain_gdpo,
    }
    for name, formula in plain.items():
        assert_close(of(name).with_advantages(experience).advantages, per_token(samples, formula))
    dr_grpo = of("grpo", normalize_std=False).with_advantages(experience).advantages
    assert_close(dr_grpo, per_token(samples, plain_centred))
    best = of("pass_at_k", k=3, normalize_std=False).with_advantages(experience).advantages
    assert_close(best, per_token(samples, plain_pass_at_k))


@settings(max_examples=20, deadline=None)
@given(rows(), st.integers(0, 20))
def test_over_a_whole_step_whatever_replica_has_which_group(samples: list[Row], cut: int) -> None:
    ranks = [[row for row in samples if (row.group < cut) == first] for first in (True, False)]
    whitening: dict[str, dict[str, object]] = {
        "reinforce_plus_plus_baseline": {},
        "gdpo": {},
        "rloo": {"whiten": True},
    }
    for (name, more), plain in zip(whitening.items(), (plain_centred, plain_gdpo, plain_rloo), strict=True):
        algorithm = of(name, **more)
        parts = [algorithm.with_advantages(packed(rank)) for rank in ranks if rank]
        sums = torch.stack([moments(part) for part in parts]).sum(0)
        replicas = Replicas(lambda _, sums=sums: sums)
        found = torch.cat([algorithm.over_whole_step(part, replicas).advantages for part in parts])
        ordered = sum(ranks, [])
        expected = whitened(per_token(ordered, plain), ordered)
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(rows(), st.integers(0, 20), st.sampled_from(["informative", "rewarded"]))
def test_gpg_scales_by_how_few_samples_teach(samples: list[Row], cut: int, scale_by: str) -> None:
    ranks = [[row for row in samples if (row.group < cut) == first] for first in (True, False)]
    algorithm = of("gpg", scale_by=scale_by)
    parts = [algorithm.with_advantages(packed(rank)) for rank in ranks if rank]
    sums: list[torch.Tensor] = []
    for part in parts:
        replicas = Replicas(lambda own: sums.append(own) or own)  # type: ignore[func-returns-value]
        algorithm.over_whole_step(part, replicas)
    total = torch.stack(sums).sum(0)
    found = torch.cat([algorithm.over_whole_step(part, Replicas(lambda _: total)).advantages for part in parts])
    ordered = sum(ranks, [])
    plain = per_token(ordered, plain_centred)
    members = [row for row in ordered if row.is_member]
    differing = {group[0].group for group in in_groups(members) if len({row.reward for row in group}) > 1}
    by_reward = sum(row.reward != 0 for row in members)
    counted = by_reward if scale_by == "rewarded" else sum(row.group in differing for row in members)
    alpha = len(members) / max(counted, 1)
    assert found.tolist() == pytest.approx([alpha * value for value in plain], rel=1e-5, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(rows(), st.sampled_from([0.5, 0.9, 1.0]), st.integers(0, 9))
def test_reinforce_plus_plus_sums_what_comes_of_a_token(samples: list[Row], gamma: float, seed: int) -> None:
    experience = packed(samples)
    penalties = torch.randn(experience.num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    algorithm = of("reinforce_plus_plus", gamma=gamma)
    found = algorithm.with_advantages(experience, penalties)
    expected = []
    first = 0
    for row in samples:
        drawn = [place for place, inside in enumerate(row.mask) if inside]
        of_steps = [float(penalties[first + place]) + row.reward * (place == drawn[-1]) for place in drawn]
        to_go = {
            place: sum(gamma**later * reward for later, reward in enumerate(of_steps[step:]))
            for step, place in enumerate(drawn)
        }
        expected += [to_go.get(place, 0.0) for place in range(len(row.mask))]
        first += len(row.mask)
    assert_close(found.advantages, expected)
    normalised = algorithm.over_whole_step(found, Replicas()).advantages
    assert normalised.tolist() == pytest.approx(whitened(expected, samples), rel=1e-6, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(MASKS, REWARDS), min_size=4, max_size=4), min_size=1, max_size=3))
def test_remax_compares_with_the_greedy_response(groups: list[list[tuple[tuple[bool, ...], float]]]) -> None:
    algorithm = algorithm_of(make_config(algorithm="remax", batch={"samples_per_prompt": 3}))
    samples = [Row(g, 4 * g + i, *sample) for g, group in enumerate(groups) for i, sample in enumerate(group)]
    experience = packed(samples)
    assert algorithm.is_greedy(experience).tolist() == [False, False, False, True] * len(groups)
    found = algorithm.with_advantages(algorithm.compared_with_greedy(experience))
    assert found.sample_ids.tolist() == [row.episode for row in samples if row.episode % 4 < 3]
    baselines = {row.group: row.reward for row in samples if row.episode % 4 == 3}
    expected = [
        (row.reward - baselines[row.group]) * inside for row in samples if row.episode % 4 < 3 for inside in row.mask
    ]
    assert_close(found.advantages, expected)


def test_remax_needs_a_greedy_sample_in_every_group() -> None:
    algorithm = algorithm_of(make_config(algorithm="remax", batch={"samples_per_prompt": 3}))
    with pytest.raises(ValueError, match=r"no greedy sample in the groups \[5\]"):
        algorithm.compared_with_greedy(packed([Row(5, 0, (True,), 1.0), Row(6, 7, (True,), 1.0)]))


NUM_DRAWN = 4
CHANCES = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


def best_of_two(chances: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Returns E[max of k = 2 rewards] / k by enumeration. The advantages leave out the factor k."""
    pairs = itertools.product(range(len(rewards)), repeat=2)
    return sum(chances[a] * chances[b] * max(rewards[a], rewards[b]) for a, b in pairs) / 2  # type: ignore[return-value]


def log_likelihood(chances: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Returns the Maclaurin series of log p up to order n - 1, -sum over m < n of (1 - p)^m / m, for p of success."""
    fails = 1 - chances @ rewards
    return -sum(fails**m / m for m in range(1, NUM_DRAWN))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "advantages", "rewards", "objective"),
    [
        ("rloo", {}, [1.0, -2.0, 0.5], lambda chances, rewards: chances @ rewards),
        ("grpo", {"normalize_std": False}, [1.0, -2.0, 0.5], lambda chances, rewards: chances @ rewards * 3 / 4),
        ("pass_at_k", {"k": 2, "normalize_std": False}, [1.0, -2.0, 0.5], best_of_two),
        ("maxrl", {}, [0.0, 1.0, 0.0], log_likelihood),
    ],
)
def test_the_expected_gradient_is_that_of_the_objective(name, advantages, rewards, objective) -> None:  # type: ignore[no-untyped-def]
    """Computes E[1/n sum of A_i grad log p_i] over all draws from a policy with three responses."""
    draws = [*itertools.product(range(3), repeat=NUM_DRAWN)]
    samples = [
        Row(group, NUM_DRAWN * group + place, (True,), rewards[response])
        for group, drawn in enumerate(draws)
        for place, response in enumerate(drawn)
    ]
    found = of(name, **advantages).with_advantages(packed(samples)).advantages
    logits = CHANCES.log().requires_grad_()
    chosen = torch.tensor(draws)
    logprobs = torch.log_softmax(logits, 0)[chosen]
    weights = CHANCES[chosen].prod(1, keepdim=True) / NUM_DRAWN
    (gradient,) = torch.autograd.grad((weights * found.view(-1, NUM_DRAWN) * logprobs).sum(), logits)
    value = objective(torch.softmax(logits, 0), torch.tensor(rewards, dtype=torch.float64))
    (expected,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "pass_at_k", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    samples = [Row(0, number, (True,), value) for number in range(7)]
    assert of(name).with_advantages(packed(samples)).advantages.tolist() == [0.0] * 7


def test_a_penalty_per_token_is_taken_off_the_response_s_reward() -> None:
    samples = [Row(0, 0, (False, True, True), 1.0), Row(0, 1, (True,), 0.0)]
    penalties = torch.tensor([5.0, -0.5, -0.25, -0.75])
    found = of("grpo", normalize_std=False).with_advantages(packed(samples), penalties).advantages
    assert found.tolist() == [0.0, 0.5, 0.5, -0.5]


def test_no_samples() -> None:
    nothing = packed([Row(0, 0, (True,), 1.0)]).select(torch.zeros(0, dtype=torch.int64))
    for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "maxrl", "pass_at_k", "gdpo"):
        assert of(name).with_advantages(nothing).advantages.shape == (0,)
    assert Groups.of(torch.zeros(0, dtype=torch.int64)).num_groups == 0


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "maxrl", "pass_at_k", "gdpo", "remax"])
def test_the_gradient_is_that_of_reinforce_where_samples_are_on_policy(name: str) -> None:
    """Expects d loss / d log p = -A / (number of response tokens), and 0 on all other tokens."""
    samples = [
        Row(0, 0, (False, True, True), 1.0, (1.0, 0.0)),
        Row(0, 1, (True, False, True), 0.0, (0.0, 3.0)),
        Row(0, 2, (False, False), 9.0, (5.0, 5.0)),
        Row(0, 3, (False, True), 0.5, (2.0, 1.0)),
    ]
    algorithm = of(name)
    experience = algorithm.with_advantages(packed(samples))
    logprobs = torch.linspace(-2, -0.1, experience.num_tokens, dtype=torch.float64, requires_grad=True)
    drawn = logprobs.detach()
    experience = experience.with_fields(actor_logprobs=drawn, rollout_logprobs=drawn)
    output = algorithm.loss_function()(experience, logprobs, torch.zeros_like(drawn))
    (gradient,) = torch.autograd.grad(output.loss / output.divisor, logprobs)
    assert gradient.tolist() == pytest.approx((-experience.advantages / 5).tolist(), abs=1e-12)


KL = {"coef": 0.2, "estimator": "k1", "where": "reward"}
ADAPTIVE = KL | {"adaptive": {"target": 0.1, "horizon": 40}}


def estimation_of(kl_coef: float | None = None, **sections: object) -> AdvantageEstimation:
    response = {"sampling": {"max_response_tokens": 8}}
    return AdvantageEstimation(algorithm_of(make_config(rollout=response, **sections)), kl_coef)


def scored(*lengths: int, truncated: tuple[int, ...] = (), kl: float = 0.0) -> Experience:
    """Returns groups of two samples with one prompt token each. A sample's reward is its index."""
    experience = packed_experience([(1, length) for length in lengths])
    return experience.with_fields(
        rewards=torch.arange(len(lengths)).float(),
        truncated=torch.tensor([place in truncated for place in range(len(lengths))]),
        reference_logprobs=experience.actor_logprobs - kl,
    )


def twice(values: torch.Tensor) -> torch.Tensor:
    """Sums over two replicas with equal values."""
    return 2 * values


def chunks(estimation: AdvantageEstimation, *parts: Experience) -> list[Experience]:
    estimation.begin_step()
    return [estimation.with_advantages(estimation.shaped(part)) for part in parts]


def test_without_shaping_nothing_is_asked_of_others_and_rewards_stay() -> None:
    estimation = estimation_of(advantages={"normalize_std": False})
    [found] = chunks(estimation, scored(2, 2))
    assert found.rewards.tolist() == [0.0, 1.0]
    assert found.advantages.tolist() == [0, -0.5, -0.5, 0, 0.5, 0.5]
    assert estimation.end_step(lambda values: pytest.fail("an unnecessary collective")) == {}


def test_overlong_responses_are_penalised_before_they_are_compared() -> None:
    penalty = {"buffer_tokens": 4, "factor": 2.0}
    estimation = estimation_of(advantages={"normalize_std": False, "overlong_penalty": penalty})
    first, _ = chunks(estimation, scored(4, 8), scored(5, 1))
    assert first.rewards.tolist() == [0.0, 1.0 - 2.0]
    assert first.advantages[first.response_mask].tolist() == [0.5] * 4 + [-0.5] * 8
    assert estimation.end_step(twice) == {"overlong_samples": 4, "overlong_penalty": pytest.approx(-2.5 / 4)}


def test_truncated_samples_are_compared_with_and_not_trained_on() -> None:
    estimation = estimation_of(advantages={"normalize_std": False, "mask_truncated": True})
    [found] = chunks(estimation, scored(2, 2, 0, truncated=(1, 2)))
    assert found.response_mask.tolist() == [False, True, True, False, False, False, False]
    assert found.advantages[found.response_mask].tolist() == [-0.5, -0.5]
    assert estimation.end_step(twice) == {"masked_truncated": 2}, "a sample without a response does not count"


@pytest.mark.parametrize("kl", [0.1, 0.11, 0.095, 0.05, 9.0, -3.0])
def test_the_distance_is_taken_off_rewards_and_the_coefficient_follows_it(kl: float) -> None:
    estimation = estimation_of(loss={"kl": ADAPTIVE}, advantages={"normalize_std": False})
    [found] = chunks(estimation, scored(2, 4, kl=kl))
    difference = 1.0 - 0.2 * kl * (4 - 2)
    assert found.advantages[5] == pytest.approx(difference / 2, rel=1e-5)
    metrics = estimation.end_step(twice)
    assert metrics == {"reward_kl": pytest.approx(kl, rel=1e-5), "kl_coef": 0.2}
    error = min(max(kl / 0.1 - 1, -0.2), 0.2)
    assert estimation.kl.coef == pytest.approx(0.2 * (1 + error * 4 / 40), rel=1e-5)


def test_a_run_that_goes_on_begins_with_its_coefficient_and_a_step_with_new_counts() -> None:
    estimation = estimation_of(0.7, loss={"kl": ADAPTIVE})
    for _ in range(2):
        chunks(estimation, scored(2, 2, kl=0.1))
    assert estimation.end_step(twice) == {"reward_kl": pytest.approx(0.1, rel=1e-5), "kl_coef": 0.7}
    assert estimation_of(None, loss={"kl": KL}).kl.coef == 0.2


def test_greedy_samples_are_gone_once_they_were_compared_with() -> None:
    estimation = estimation_of(algorithm="remax", batch={"samples_per_prompt": 1})
    experience = scored(2, 3, 1, 2).with_fields(sample_ids=torch.tensor([10, 11, 12, 13]))
    [found] = chunks(estimation, experience)
    assert found.sample_ids.tolist() == [10, 12]
    assert found.advantages.tolist() == [0, -1, -1, 0, -1]


def test_every_replica_comes_to_the_same_coefficient() -> None:
    parts = [scored(2, 2, kl=0.3), scored(1, 5, kl=0.05)]
    own, both = ([estimation_of(loss={"kl": ADAPTIVE}) for _ in parts] for _ in range(2))
    sent: list[torch.Tensor] = []
    for replica, part in zip(own, parts, strict=True):
        chunks(replica, part)
        replica.end_step(lambda values: sent.append(values) or values)  # type: ignore[func-returns-value]
    for replica, part in zip(both, parts, strict=True):
        chunks(replica, part)
        metrics = replica.end_step(lambda _: sum(sent[1:], sent[0]))
        assert metrics["reward_kl"] == pytest.approx((0.3 + 0.05) / 2, rel=1e-5)
    assert both[0].kl.coef == both[1].kl.coef


SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 13)), min_size=1, max_size=5)
FRACTIONS = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Computes each advantage as the discounted sum of all temporal differences from its token on, in O(n^2)."""
    next_values = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, next_values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def expected_of(
    experience: Experience, token_rewards: torch.Tensor, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    advantages, returns = [0.0] * experience.num_tokens, [0.0] * experience.num_tokens
    offsets = experience.offsets().tolist()
    for sample, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        positions = [i for i in range(start, end) if experience.response_mask[i]]
        if not positions:
            continue
        of_turns = [float(experience.turn_rewards[i]) for i in positions]
        rewards = [float(token_rewards[i]) + reward for i, reward in zip(positions, of_turns, strict=True)]
        rewards[-1] += float(experience.rewards[sample]) - sum(of_turns)
        values = [float(experience.values[i]) for i in positions]
        for i, advantage, value in zip(positions, plain_gae(rewards, values, gamma, lam), values, strict=True):
            advantages[i], returns[i] = advantage, advantage + value
    return advantages, returns


@settings(max_examples=30)
@given(
    shape=SHAPES, gamma=FRACTIONS, lam=FRACTIONS, penalised=st.booleans(), turns=st.booleans(), seed=st.integers(0, 9)
)
@example(shape=[(2, 3), (1, 2)], gamma=1.0, lam=1.0, penalised=False, turns=False, seed=0)
@example(shape=[(2, 6), (1, 3)], gamma=0.9, lam=0.8, penalised=False, turns=True, seed=1)
def test_equals_the_definition(
    shape: list[tuple[int, int]], gamma: float, lam: float, penalised: bool, turns: bool, seed: int
) -> None:
    """Covers tokens of the environment between turns, and rewards at the ends of turns."""
    experience, generator = packed_experience(shape, seed), torch.Generator().manual_seed(seed)
    token_rewards = torch.randn(experience.num_tokens, generator=generator) * penalised
    if turns:
        mask = experience.response_mask & (torch.rand(experience.num_tokens, generator=generator) < 0.7)
        ends = mask & (torch.rand(experience.num_tokens, generator=generator) < 0.5)
        turn_rewards = torch.randn(experience.num_tokens, generator=generator) * ends
        experience = experience.with_fields(response_mask=mask, turn_rewards=turn_rewards)
    actual = with_gae(experience, token_rewards if penalised else None, gamma=gamma, lam=lam)
    advantages, returns = expected_of(experience, token_rewards, gamma, lam)
    assert actual.advantages.tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-5)
    assert actual.returns.tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)


def test_a_long_response_is_as_exact_as_a_short_one() -> None:
    experience = packed_experience([(1, 5000)])
    result = with_gae(experience, gamma=1.0, lam=1.0)
    first = experience.rewards[0] - experience.values[1]
    torch.testing.assert_close(result.advantages[1], first, rtol=1e-6, atol=1e-6)


def test_gae_of_no_samples() -> None:
    nothing = packed_experience([(1, 1)]).select(torch.zeros(0, dtype=torch.int64))
    result = with_gae(nothing, gamma=1.0, lam=0.95)
    assert result.advantages.shape == (0,)
    assert moments(result).tolist() == [0, 0, 0]


@pytest.mark.parametrize("missing", ["rewards", "values", "reference_logprobs"])
def test_a_missing_field_is_named(missing: str) -> None:
    columns = packed_experience([(1, 2)]).with_fields(reference_logprobs=torch.zeros(3)).columns()
    del columns[missing]
    with pytest.raises(ValueError, match=f"no {missing} in this experience"):
        response_kl(with_gae(Experience(**columns), gamma=1.0, lam=1.0), schema.Kl())


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_equal_advantages_whiten_to_zero(num_tokens: int) -> None:
    advantages, mask = torch.full((4,), 0.3), torch.arange(4) < num_tokens
    chosen = advantages[mask].double()
    sums = torch.stack([chosen.new_tensor(num_tokens), chosen.sum(), chosen.square().sum()])
    assert whiten(advantages, mask, sums).tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def experience_of(actor_logprobs: torch.Tensor | None = None) -> Experience:
    """Returns responses of two and one tokens, and a sample without a response."""
    return Experience(
        group_ids=torch.tensor([0, 0, 0]),
        lengths=torch.tensor([3, 2, 1]),
        response_mask=torch.tensor([False, True, True, False, True, False]),
        tokens=torch.zeros(6, dtype=torch.int64),
        rollout_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, 0.0]),
        actor_logprobs=actor_logprobs,
        reference_logprobs=torch.tensor([-500.0, -1.5, -2.25, 500.0, -2.0, 7.0]),
    )


def adaptive(coef: float, target: float, horizon: int) -> KlCoefficient:
    kl = {"coef": coef, "where": "reward", "adaptive": {"target": target, "horizon": horizon}}
    return KlCoefficient(schema.Kl.model_validate(kl), coef)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0, 0.5, 0.25, 0, -1, 0]),
        ("k2", [0, 0.125, 0.03125, 0, 0.5, 0]),
        ("k3", [0, math.exp(-0.5) - 0.5, math.exp(-0.25) - 0.75, 0, math.e - 2, 0]),
    ],
)
def test_of_each_response_token(estimator: Any, expected: list[float]) -> None:
    token_kl = response_kl(experience_of(), schema.Kl(estimator=estimator))
    assert token_kl.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_actor_s_own_logprobs_are_preferred() -> None:
    actor = torch.tensor([0.0, -1.5, -2.25, 0.0, -2.0, 0.0])
    assert not response_kl(experience_of(actor), schema.Kl()).any()


def test_responses_weigh_the_same_however_long_and_those_without_tokens_nothing() -> None:
    experience = experience_of()
    sums = mean_kl_sums(experience, response_kl(experience, schema.Kl(estimator="k1")))
    assert sums.tolist() == pytest.approx([(0.5 + 0.25) / 2 - 1, 2])


def test_the_coefficient_is_never_negative_and_stays_where_nothing_adapts_it() -> None:
    kl = adaptive(0.2, target=0.1, horizon=10)
    kl.after(0.0, 1000)
    assert kl.coef == 0
    fixed = KlCoefficient(schema.Kl(coef=0.2, where="reward"), 0.2)
    fixed.after(5.0, 64)
    assert fixed.coef == 0.2
    unmeasured = adaptive(0.2, target=0.1, horizon=10)
    unmeasured.after(0.0, 0)
    assert unmeasured.coef == 0.2


def plain_penalty(length: int, longest: int, buffer: int) -> float:
    """Implements equation 13 of Yu et al. 2025."""
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)).filter(sum), min_size=1, max_size=6), st.integers(1, 10)
)
def test_equals_the_equation(shape: list[tuple[int, int]], buffer: int) -> None:
    settings = OverlongPenalty(buffer_tokens=buffer, factor=0.5)
    found = overlong_penalties(packed_experience(shape), settings, max_response_tokens=10)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.5 * plain_penalty(length, 10, buffer) for _, length in shape])


def test_what_was_observed_between_turns_takes_room_and_what_stands_before_them_does_not() -> None:
    experience = packed_experience([(2, 6), (1, 1)])
    mask = experience.response_mask.clone()
    mask[4:6] = False
    found = overlong_penalties(experience.with_fields(response_mask=mask), OverlongPenalty(buffer_tokens=4), 8)
    assert found.tolist() == [-0.5, 0.0]
