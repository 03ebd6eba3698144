"""GAE against the double sum of its definition, with plain Python numbers, and whitening against statistics."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import moments, whiten, with_gae
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience

SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 13)), min_size=1, max_size=5)
FRACTIONS = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Each advantage as the sum of all temporal differences that follow it, O(n^2)."""
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
        rewards = [float(token_rewards[i]) for i in positions]
        rewards[-1] += float(experience.rewards[sample])
        values = [float(experience.values[i]) for i in positions]
        for i, advantage, value in zip(positions, plain_gae(rewards, values, gamma, lam), values, strict=True):
            advantages[i], returns[i] = advantage, advantage + value
    return advantages, returns


@settings(max_examples=30)
@given(
    shape=SHAPES, gamma=FRACTIONS, lam=FRACTIONS, penalised=st.booleans(), holes=st.booleans(), seed=st.integers(0, 9)
)
def test_equals_the_definition(
    shape: list[tuple[int, int]], gamma: float, lam: float, penalised: bool, holes: bool, seed: int
) -> None:
    experience, generator = packed_experience(shape, seed), torch.Generator().manual_seed(seed)
    token_rewards = torch.randn(experience.num_tokens, generator=generator) * penalised
    if holes:
        experience = experience.with_fields(
            response_mask=experience.response_mask & (torch.rand(experience.num_tokens, generator=generator) < 0.7)
        )
    actual = with_gae(experience, token_rewards if penalised else None, gamma=gamma, lam=lam)
    assert actual.advantages is not None and actual.returns is not None
    advantages, returns = expected_of(experience, token_rewards, gamma, lam)
    assert actual.advantages.tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-5)
    assert actual.returns.tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)


def test_lambda_one_without_discount_is_reward_to_come_less_value() -> None:
    experience = packed_experience([(2, 3), (1, 2)])
    result = with_gae(experience, gamma=1.0, lam=1.0)
    first, second = experience.rewards.tolist()
    mask = experience.response_mask
    assert result.returns is not None and result.advantages is not None
    assert result.returns[mask].tolist() == pytest.approx([first] * 3 + [second] * 2, rel=1e-5)
    torch.testing.assert_close(result.advantages[mask], (result.returns - experience.values)[mask])


def test_a_long_response_is_as_exact_as_a_short_one() -> None:
    experience = packed_experience([(1, 5000)])
    result = with_gae(experience, gamma=1.0, lam=1.0)
    assert result.advantages is not None
    first = experience.rewards[0] - experience.values[1]
    torch.testing.assert_close(result.advantages[1], first, rtol=1e-6, atol=1e-6)


def test_no_samples() -> None:
    nothing = packed_experience([(1, 1)]).select(torch.zeros(0, dtype=torch.int64))
    result = with_gae(nothing, gamma=1.0, lam=0.95)
    assert result.advantages is not None and result.advantages.shape == (0,)
    assert moments(result).tolist() == [0, 0, 0]


@pytest.mark.parametrize("missing", ["rewards", "values"])
def test_a_missing_field_is_named(missing: str) -> None:
    whole = packed_experience([(1, 2)])
    columns = {name: value for name, value in whole.columns().items() if name != missing}
    with pytest.raises(ValueError, match=f"no {missing} in this experience"):
        with_gae(Experience(**columns), gamma=1.0, lam=1.0)


@settings(max_examples=30)
@given(shape=SHAPES, cut=st.integers(0, 5), seed=st.integers(0, 9))
def test_whitened_over_all_ranks(shape: list[tuple[int, int]], cut: int, seed: int) -> None:
    experience = with_gae(packed_experience([(1, 2), *shape], seed), gamma=1.0, lam=0.9)
    samples = torch.arange(experience.num_samples)
    ranks = [experience.select(samples[:cut]), experience.select(samples[cut:])]
    sums = torch.stack([moments(rank) for rank in ranks]).sum(0)
    whitened = []
    for rank in ranks:
        assert rank.advantages is not None
        values = whiten(rank.advantages, rank.response_mask, sums)
        assert not values[~rank.response_mask].any()
        whitened += values[rank.response_mask].tolist()
    assert statistics.fmean(whitened) == pytest.approx(0, abs=1e-5)
    assert statistics.stdev(whitened) == pytest.approx(1, rel=1e-4)
    before = experience.advantages[experience.response_mask].tolist()
    assert sorted(range(len(before)), key=before.__getitem__) == sorted(range(len(before)), key=whitened.__getitem__)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_equal_advantages_whiten_to_zero(num_tokens: int) -> None:
    advantages, mask = torch.full((4,), 0.3), torch.arange(4) < num_tokens
    chosen = advantages[mask].double()
    sums = torch.stack([chosen.new_tensor(num_tokens), chosen.sum(), chosen.square().sum()])
    assert whiten(advantages, mask, sums).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
