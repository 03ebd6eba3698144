"""Groups of unequal numbers of samples: episodes that branched have several, and count once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.advantages import with_gae
from rltrain.data.experience import SIBLINGS_APART, mini_batch_of
from rltrain.environments.interface import Trajectory
from rltrain.rollout.episodes import CURRENT_VERSION, Observed, Unusable, told_trajectories, with_shared_reward
from rltrain.rollout.sample import Sample, Status
from tests.through_json import through_json
from tests.unit.packed_experience import packed_experience


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from([(4, 1), (4, 2), (4, 4), (4, 8), (1, 2)]))
def test_every_sample_is_in_one_mini_batch_and_each_takes_some_of_every_large_group(sizes, shape):
    samples_per_group, num_mini_batches = shape
    num_groups = len(sizes)
    if num_groups * samples_per_group % num_mini_batches:
        return
    groups = torch.repeat_interleave(torch.arange(num_groups), torch.tensor(sizes))
    num_blocks = max(num_mini_batches // samples_per_group, 1)
    found = mini_batch_of(groups, num_groups, samples_per_group, num_mini_batches, num_blocks)
    assert len(found) == sum(sizes)
    assert int(found.min()) >= 0 and int(found.max()) < num_mini_batches
    if num_mini_batches <= samples_per_group:
        for group, size in enumerate(sizes):
            if size >= samples_per_group:
                assert set(found[groups == group].tolist()) == set(range(num_mini_batches))


def test_equal_groups_are_cut_as_ever():
    groups = torch.repeat_interleave(torch.arange(3), 4)
    assert mini_batch_of(groups, 3, 4, 2, 1).tolist() == [0, 0, 1, 1] * 3


def test_rewards_of_turns_stand_at_their_ends_in_gae():
    """By the recursion of the paper, backwards over the tokens that the model drew."""
    experience = packed_experience([(2, 6), (1, 3)], seed=1)
    mask = experience.response_mask.clone()
    mask[4] = False  # the environment's, between two turns
    turn_rewards = torch.zeros(experience.num_tokens)
    turn_rewards[3], turn_rewards[7] = 0.5, -0.25
    rewards = torch.tensor([0.25 + 1.0, 2.0])  # another 1.0 that came with no turn
    gamma, lam = 0.9, 0.8
    experience = experience.with_fields(response_mask=mask, turn_rewards=turn_rewards, rewards=rewards)
    found = with_gae(experience, gamma=gamma, lam=lam)
    expected = torch.zeros(experience.num_tokens, dtype=torch.float64)
    for first, end, rest in ((0, 8, 1.0), (8, 12, 2.0)):
        advantage = next_value = 0.0
        drawn = [token for token in range(first, end) if mask[token]]
        for token in reversed(drawn):
            reward = float(turn_rewards[token]) + (rest if token == drawn[-1] else 0.0)
            value = float(experience.values[token])
            advantage = reward + gamma * next_value - value + gamma * lam * advantage
            expected[token], next_value = advantage, value
    torch.testing.assert_close(found.advantages.double(), expected, atol=1e-6, rtol=1e-6)


def drawn(number: int, prompt: tuple[int, ...], turns: list[tuple[int, ...]]) -> Sample:
    sample = Sample(number, prompt, seed=5)
    for turn in turns:
        count = len(turn)
        sample = sample.observed((90,)) if sample.tokens else sample
        sample = sample.drawn(turn, [-1.0] * count, [3] * count, Status.STOPPED)
    return sample


def test_a_context_that_does_not_go_on_begins_another_trajectory():
    sample = drawn(7, (1, 2), [(5, 6)])
    new, closed = Observed(7, tokens=(1, 2, 5, 9), reward=0.5, branches=True).applied_to(sample, max_turn_tokens=4)
    assert (closed.id, closed.turn_rewards, closed.status) == (7 + SIBLINGS_APART, (0.5,), Status.STOPPED)
    assert (new.id, new.prompt, new.tokens, new.parent) == (7, (1, 2, 5, 9), (), closed.id)
    assert new.seed != sample.seed and new.episode == closed.episode == 7
    again, second = Observed(7, tokens=(4,), branches=True).applied_to(drawn_from(new), max_turn_tokens=None)
    assert second.id == 7 + 2 * SIBLINGS_APART and again.parent == second.id


def drawn_from(sample: Sample) -> Sample:
    return sample.drawn((8,), (-0.5,), (3,), Status.STOPPED)


def test_all_trajectories_of_an_episode_are_worth_what_it_was():
    first = Observed(1, Status.STOPPED, reward=0.25).applied_to(drawn(1, (1,), [(5,)]), None)[0]
    second = Observed(1, Status.STOPPED, reward=1.0).applied_to(drawn(1, (1, 2), [(6,)]), None)[0]
    shared = with_shared_reward([first, second])
    assert [sum(sample.turn_rewards) for sample in shared] == [1.25, 1.25]


def test_told_trajectories_take_what_the_engine_recorded():
    known = drawn(3, (1, 2), [(5, 6), (7,)])
    told = Trajectory(known.context, num_response_tokens=4, reward=2.0)
    answer = told_trajectories(known, [known], [told])
    (sample,) = answer.trajectories
    assert (sample.prompt, sample.tokens, sample.loss_mask) == (known.prompt, known.tokens, known.loss_mask)
    assert (sample.logprobs, sample.turn_rewards) == (known.logprobs, (2.0,))
    other = Trajectory((1, 8, 9), num_response_tokens=2, reward=1.0, logprobs=(-0.1, -0.2), trained_on=False)
    first, second = told_trajectories(known, [known], [told, other]).trajectories
    assert (second.id, second.tokens, second.loss_mask) == (3 + SIBLINGS_APART, (8, 9), (False, False))
    assert set(second.policy_versions) == {CURRENT_VERSION}
    unknown = Trajectory((1, 8, 9), num_response_tokens=2, reward=1.0)
    with pytest.raises(Unusable, match="trajectory 0"):
        told_trajectories(known, [known], [unknown])


@pytest.mark.parametrize("answer", [Observed(3, tokens=(1,), reward=0.1), Observed(4, Status.FAILED)])
def test_answers_are_the_same_on_all_ranks(answer):
    assert through_json(answer) == answer
