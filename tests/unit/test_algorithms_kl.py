"""KL estimators against Schulman's formulas and against the exact divergence."""

import math
from typing import Any

import pytest
import torch

from rltrain.algorithms.kl import kl_estimate

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
