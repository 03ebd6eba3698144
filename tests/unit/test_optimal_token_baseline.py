"""The optimal token baseline, written out token by token."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.registry import algorithm_of
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config

ACTOR = {"actor, reference, rollout, reward": 0}
SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=7)
WEIGHTS = [None, {"high": 1.2}, {"method": "icepop", "low": 0.8, "high": 1.5, "level": "sequence"}]


def of(**sections: Any) -> Any:
    return algorithm_of(make_config(algorithm="optimal_token_baseline", **sections))


def with_squares(shape: list[tuple[int, int]], seed: int = 0) -> Experience:
    """What a vocabulary of 5 gives."""
    experience = packed_experience(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(experience.num_tokens, 5, generator=generator)).softmax(1)
    return experience.with_fields(actor_logprobs=probabilities[:, 0].log(), actor_squares=probabilities.square().sum(1))


def written_out(experience: Experience, penalty: torch.Tensor | None, correction: dict[str, Any] | None) -> list[float]:
    """By loops: of every response token what is still to come of the reward less the weighed mean at its place."""
    advantages = [0.0] * experience.num_tokens
    offsets, places, energies, to_go = experience.offsets().tolist(), [], [], []
    for sample in range(experience.num_samples):
        own = [i for i in range(offsets[sample], offsets[sample + 1]) if experience.response_mask[i]]
        log_ratios = [(experience.actor_logprobs[i] - experience.rollout_logprobs[i]).item() for i in own]
        total, weights, rewards = 0.0, [], []
        for place, i in enumerate(own):
            weight = 1.0
            if correction:
                of_level = sum(log_ratios) if correction.get("level") == "sequence" else log_ratios[place]
                ratio = math.exp(of_level)
                weight = min(ratio, correction["high"])
                if correction.get("method") == "icepop":
                    weight = ratio if correction["low"] <= ratio <= correction["high"] else 0.0
            probability = math.exp(experience.actor_logprobs[i])
            total += weight**2 * (1 - 2 * probability + experience.actor_squares[i].item())
            weights.append(total)
            left = 0.0 if penalty is None else sum(penalty[j].item() for j in own[place:])
            rewards.append(experience.rewards[sample].item() + left)
        places.append(own)
        energies.append(weights)
        to_go.append(rewards)
    for sample, own in enumerate(places):
        group = [j for j in range(len(places)) if experience.group_ids[j] == experience.group_ids[sample] and places[j]]
        for place, i in enumerate(own):
            there = [j for j in group if len(places[j]) > place]
            weighed = sum(energies[j][place] * to_go[j][place] for j in there)
            baseline = weighed / (sum(energies[j][place] for j in there) + 1e-8) if len(there) > 1 else 0.0
            advantages[i] = to_go[sample][place] - baseline if len(group) > 1 else 0.0
    return advantages


@pytest.mark.parametrize("correction", WEIGHTS)
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 9), penalized=st.booleans())
def test_every_token_has_the_baseline_of_its_place(
    correction: dict[str, Any] | None, shape: list[tuple[int, int]], seed: int, penalized: bool
) -> None:
    experience = with_squares(shape, seed)
    penalty = -torch.rand(experience.num_tokens, generator=torch.Generator().manual_seed(seed)) if penalized else None
    found = of(loss={"correction": correction or {}}).with_advantages(experience, penalty).advantages
    assert found.tolist() == pytest.approx(written_out(experience, penalty, correction), rel=1e-4, abs=1e-5)


def test_equal_rewards_teach_nothing_but_where_one_response_is_alone() -> None:
    experience = with_squares([(1, 2), (1, 4)]).with_fields(rewards=torch.tensor([0.5, 0.5]))
    found = of().with_advantages(experience).advantages
    assert found[experience.response_mask].tolist() == pytest.approx([0, 0, 0, 0, 0.5, 0.5], abs=1e-6)


def test_it_has_the_least_variance_of_all_constants() -> None:
    """Over one token of a vocabulary of 4, each as often as the policy draws it: no other baseline gives the gradient
    by the logits, (r - b) (one_hot - p), a smaller variance."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    drawn = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 3, 2, 1]))
    experience = packed_experience([(1, 1)] * 10).with_fields(
        group_ids=torch.zeros(10, dtype=torch.int64),
        rewards=rewards[drawn],
        actor_logprobs=probabilities[drawn].log().repeat_interleave(2),
        actor_squares=probabilities.square().sum().expand(20),
    )
    found = of().with_advantages(experience).advantages[experience.response_mask]
    baseline = (rewards[drawn] - found).mean().item()
    scores = torch.eye(4, dtype=torch.float64) - probabilities

    def spread(constant: float) -> float:
        return float((((rewards - constant) ** 2) * scores.square().sum(1) * probabilities).sum())

    assert all(spread(baseline) < spread(baseline + step) for step in (-0.05, 0.05))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"loss": {"old_logprobs": "rollout"}}, "loss.old_logprobs: got rollout; expected actor"),
        ({"model": {"path": "m", "router_replay": "recompute"}}, "model.router_replay: got recompute"),
        ({"batch": {"samples_per_prompt": 1}}, "compares the samples of a prompt"),
    ],
)
def test_what_it_needs_is_asked_for(sections: dict[str, Any], told: str) -> None:
    assert told in " ".join(of(**sections).problems())
    assert "inference" not in of().usable_roles()
