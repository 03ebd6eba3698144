"""KL estimators against Schulman's formulas and against the exact divergence, and KL as a reward penalty."""

import math
from typing import Any

import pytest
import torch

from rltrain.algorithms.kl import apply_kl_to_rewards, kl_estimate, kl_penalty
from rltrain.config import schema
from rltrain.data.experience import Experience

ACTOR = torch.tensor([0.6, 0.3, 0.1])
REFERENCE = torch.tensor([0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_known_values(estimator: Any, expected: float) -> None:
    actor, reference = torch.tensor([0.0, -1.5]), torch.tensor([-math.log(2), -1.5])
    values = kl_estimate(actor, reference, estimator)
    assert values.tolist() == pytest.approx([expected, 0.0], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Any) -> None:
    exact = (ACTOR * (ACTOR / REFERENCE).log()).sum()
    expectation = (ACTOR * kl_estimate(ACTOR.log(), REFERENCE.log(), estimator)).sum()
    torch.testing.assert_close(expectation, exact)


def test_the_gradient_of_k2_is_an_unbiased_estimate_of_the_gradient_of_the_divergence() -> None:
    logits = ACTOR.log().clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
    estimate = (ACTOR * kl_estimate(logprobs, REFERENCE.log(), "k2")).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(gradient, exact_gradient)


def test_k3_is_never_negative_and_exact_for_tiny_differences() -> None:
    actor = torch.linspace(-3, 0, 301)
    assert bool((kl_estimate(actor, torch.full_like(actor, -1.0), "k3") >= 0).all())


def experience_with_rewards(actor_logprobs: torch.Tensor | None) -> Experience:
    return Experience(
        sample_ids=torch.tensor([0, 1]),
        group_ids=torch.tensor([0, 0]),
        prompt_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([3, 2]),
        truncated=torch.tensor([False, False]),
        tokens=torch.zeros(5, dtype=torch.int64),
        response_mask=torch.tensor([False, True, True, False, True]),
        policy_version=torch.zeros(5, dtype=torch.int32),
        rollout_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0]),
        actor_logprobs=actor_logprobs,
        reference_logprobs=torch.tensor([-500.0, -1.5, -2.25, 500.0, -2.0]),
        rewards=torch.tensor([1.0, 0.0]),
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0, 0.5, 0.25, 0, -1]),
        ("k2", [0, 0.125, 0.03125, 0, 0.5]),
        ("k3", [0, math.exp(-0.5) - 0.5, math.exp(-0.25) - 0.75, 0, math.e - 2]),
    ],
)
def test_penalty_of_each_response_token(estimator: Any, expected: list[float]) -> None:
    penalty = kl_penalty(experience_with_rewards(None), schema.Kl(coef=0.1, estimator=estimator, where="reward"))
    assert penalty.tolist() == pytest.approx([-0.1 * value for value in expected], abs=1e-6)


def test_penalty_is_summed_over_the_response() -> None:
    penalised = apply_kl_to_rewards(experience_with_rewards(None), schema.Kl(coef=0.1, estimator="k1", where="reward"))
    assert penalised.rewards is not None
    assert penalised.rewards.tolist() == pytest.approx([1.0 - 0.1 * (0.5 + 0.25), 0.1 * 1.0])


def test_the_actor_s_own_logprobs_are_preferred() -> None:
    actor = torch.tensor([0.0, -1.5, -2.25, 0.0, -2.0])
    penalised = apply_kl_to_rewards(experience_with_rewards(actor), schema.Kl(coef=0.1, estimator="k3", where="reward"))
    assert penalised.rewards is not None and penalised.rewards.tolist() == [1.0, 0.0]


def test_missing_fields_are_named() -> None:
    whole = experience_with_rewards(None)
    fields = {name: getattr(whole, name) for name in whole.present() if name != "reference_logprobs"}
    with pytest.raises(ValueError, match="reference_logprobs"):
        apply_kl_to_rewards(Experience(**fields), schema.Kl(coef=0.1, where="reward"))
