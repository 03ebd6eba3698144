"""Algorithms as objects: what each says of a run, and what it makes of samples."""

import math
from typing import get_args

import pytest
import torch

from rltrain.algorithms.advantages import with_gae
from rltrain.algorithms.algorithm import Algorithm, Replicas
from rltrain.algorithms.registry import ALGORITHMS, algorithm_of
from rltrain.config.schema import Config
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import NO_EVALUATION, make_config

OPTIONAL = {"env", "evaluation", "inference", "teacher"}
PENALTY = {"coef": 0.3, "where": "reward"}


def of(name: str, **sections) -> Algorithm:
    return algorithm_of(make_config(algorithm=name, **sections))


def samples() -> Experience:
    experience = packed_experience([(2, 3), (1, 5), (2, 1), (2, 4)])
    return experience.with_fields(returns=None, reference_logprobs=experience.rollout_logprobs * 1.5)


def test_the_config_takes_the_names_of_the_registry():
    assert set(get_args(Config.model_fields["algorithm"].annotation)) == ALGORITHMS.keys()


@pytest.mark.parametrize(
    ("name", "sections", "needed", "usable"),
    [
        ("grpo", {}, {"actor", "rollout", "reward"}, {"reference"}),
        ("grpo", {"loss": {"kl": PENALTY}}, {"actor", "rollout", "reward", "reference"}, set()),
        ("ppo", {}, {"actor", "critic", "rollout", "reward"}, {"reference"}),
        ("remax", {}, {"actor", "rollout", "reward"}, {"reference"}),
        ("reinforce_plus_plus", {"loss": {"kl": PENALTY}}, {"actor", "rollout", "reward", "reference"}, set()),
        ("sft", {}, {"actor", "rollout", "reward"}, {"evaluation"}),
        ("sft", {"placement": {"actor": 0, "evaluation": 1}}, {"actor", "evaluation"}, set()),
        ("sft", {"loss": {"kl": PENALTY}, **NO_EVALUATION}, {"actor"}, set()),
        ("dpo", {}, {"actor", "reference"}, set()),
        ("reward_model", {}, {"actor"}, set()),
    ],
)
def test_the_roles_of_a_run(name, sections, needed, usable):
    algorithm = of(name, **sections)
    assert algorithm.needs().keys() == needed
    rewarding = {"reward_model", "judge"} if "reward" in needed else set()
    assert algorithm.usable_roles() == needed | usable | rewarding | (OPTIONAL if algorithm.generates else set())


@pytest.mark.parametrize("penalised", [False, True])
def test_ppo_compares_with_the_critic_and_leaves_it_returns(penalised):
    experience = samples()
    token_rewards = -torch.rand(experience.num_tokens) if penalised else None
    algorithm = of("ppo", advantages={"gamma": 0.9, "gae_lambda": 0.5})
    found = algorithm.with_advantages(experience, token_rewards)
    expected = with_gae(experience, token_rewards, gamma=0.9, lam=0.5)
    assert torch.equal(found.advantages, expected.advantages)
    assert torch.equal(found.returns, expected.returns)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "remax"])
def test_without_a_critic_there_are_no_returns_for_it(name):
    assert not of(name).with_advantages(samples().with_fields(values=None)).has("returns")


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"remax", "sft"}))
def test_without_greedy_samples_all_are_trained_on(name):
    algorithm, experience = of(name), samples()
    assert algorithm.greedy_samples_per_group() == 0
    assert not algorithm.is_greedy(experience).any()
    assert algorithm.compared_with_greedy(experience) is experience


def test_ppo_whitens_a_step_by_the_sums_of_all_replicas():
    algorithm = of("ppo")
    experience = algorithm.with_advantages(samples())
    seen = []
    found = algorithm.over_whole_step(experience, Replicas(lambda sums: seen.append(sums) or sums))
    trained_on = found.advantages[found.response_mask].double()
    assert len(seen) == 1 and seen[0][0] == experience.response_mask.sum()
    assert abs(trained_on.mean()) < 1e-6 and math.isclose(trained_on.std(), 1, rel_tol=1e-5)


@pytest.mark.parametrize("algorithm", [of("grpo"), of("ppo", advantages={"whiten": False}), of("sft"), of("dpo")])
def test_without_whitening_a_step_is_as_it_was_and_nobody_is_asked(algorithm):
    experience = samples()
    assert not algorithm.needs_whole_step()
    nothing = Replicas(lambda sums: pytest.fail("a collective for nothing"))
    assert algorithm.over_whole_step(experience, nothing) is experience


def test_the_actor_takes_demonstrations_as_they_are_and_samples_as_they_were_drawn():
    sampling = {"rollout": {"sampling": {"temperature": 0.7}}}
    assert [of(name, **sampling).temperature() for name in ("grpo", "ppo", "sft", "dpo")] == [0.7, 0.7, 1.0, 1.0]
