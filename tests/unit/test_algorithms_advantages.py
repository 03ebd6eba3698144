"""Group-relative advantages against a plain-Python reference and known values."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import STD_EPS, group_advantages, with_advantages
from rltrain.data.experience import Experience


def plain_advantages(rewards: list[float], groups: list[int], normalize_std: bool) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            result.append(0.0)
            continue
        centred = reward - statistics.fmean(members)
        result.append(centred / (statistics.stdev(members) + STD_EPS) if normalize_std else centred)
    return result


@settings(max_examples=60)
@given(
    samples=st.lists(st.tuples(st.floats(-3, 3, width=16), st.integers(0, 4)), min_size=1, max_size=20),
    normalize_std=st.booleans(),
)
def test_equals_plain_python(samples: list[tuple[float, int]], normalize_std: bool) -> None:
    rewards, groups = [r for r, _ in samples], [7 * g for _, g in samples]
    actual = group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std)
    expected = torch.tensor(plain_advantages(rewards, groups, normalize_std), dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_known_values() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 0, 9])
    centred = group_advantages(rewards, groups, normalize_std=False)
    assert centred.tolist() == [0.5, -0.5, 0.5, -0.5, 0.0]
    scaled = group_advantages(rewards, groups, normalize_std=True)
    torch.testing.assert_close(scaled, torch.tensor([0.8660, -0.8660, 0.8660, -0.8660, 0.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(value: float, normalize_std: bool) -> None:
    advantages = group_advantages(
        torch.full((7,), value), torch.zeros(7, dtype=torch.int64), normalize_std=normalize_std
    )
    assert advantages.tolist() == [0.0] * 7


def test_no_samples() -> None:
    empty = torch.empty(0)
    assert group_advantages(empty, empty.long(), normalize_std=True).shape == (0,)


def test_a_sample_s_advantage_stands_on_its_response_tokens_only() -> None:
    experience = Experience(
        sample_ids=torch.tensor([0, 1]),
        group_ids=torch.tensor([3, 3]),
        prompt_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([3, 2]),
        truncated=torch.tensor([False, False]),
        tokens=torch.zeros(5, dtype=torch.int64),
        response_mask=torch.tensor([False, True, True, False, True]),
        policy_version=torch.zeros(5, dtype=torch.int32),
        rollout_logprobs=torch.zeros(5),
        rewards=torch.tensor([2.0, 0.0]),
    )
    advantages = with_advantages(experience, normalize_std=False).advantages
    assert advantages is not None and advantages.tolist() == [0.0, 1.0, 1.0, 0.0, -1.0]


def test_a_sample_without_response_is_no_member_of_its_group() -> None:
    experience = Experience(
        sample_ids=torch.arange(3),
        group_ids=torch.tensor([0, 0, 0]),
        prompt_ids=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([2, 2, 2]),
        truncated=torch.zeros(3, dtype=torch.bool),
        tokens=torch.zeros(6, dtype=torch.int64),
        response_mask=torch.tensor([False, True, False, False, False, True]),
        policy_version=torch.zeros(6, dtype=torch.int32),
        rollout_logprobs=torch.zeros(6),
        rewards=torch.tensor([2.0, 100.0, 0.0]),
    )
    advantages = with_advantages(experience, normalize_std=False).advantages
    assert advantages is not None and advantages.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, -1.0]
