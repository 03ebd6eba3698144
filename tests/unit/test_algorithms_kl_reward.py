"""KL as a reward per token, and the coefficient that adapts, against Ziegler et al.'s update."""

import math
from typing import Any

import pytest
import torch

from rltrain.algorithms.advantages import KlCoefficient, mean_kl_sums, response_kl
from rltrain.config import schema
from rltrain.data.experience import Experience


def experience_of(actor_logprobs: torch.Tensor | None = None) -> Experience:
    """Responses of two and one tokens, and a sample without one."""
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


def test_missing_fields_are_named() -> None:
    whole = experience_of()
    fields = {name: getattr(whole, name) for name in whole.present() if name != "reference_logprobs"}
    with pytest.raises(ValueError, match="reference_logprobs"):
        response_kl(Experience(**fields), schema.Kl())


def test_responses_weigh_the_same_however_long_and_those_without_tokens_nothing() -> None:
    experience = experience_of()
    sums = mean_kl_sums(experience, response_kl(experience, schema.Kl(estimator="k1")))
    assert sums.tolist() == pytest.approx([(0.5 + 0.25) / 2 - 1, 2])


@pytest.mark.parametrize(
    ("measured", "error"), [(0.1, 0.0), (0.11, 0.1), (0.05, -0.2), (9.0, 0.2), (-3.0, -0.2), (0.095, -0.05)]
)
def test_the_coefficient_follows_the_distance_that_was_measured(measured: float, error: float) -> None:
    kl = adaptive(0.2, target=0.1, horizon=1000)
    kl.after(measured, 64)
    assert kl.coef == pytest.approx(0.2 * (1 + error * 64 / 1000))


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
