"""What the actor makes of scored samples, over the chunks of a step and the replicas."""

from collections.abc import Callable

import pytest
import torch

from rltrain.algorithms.registry import algorithm_of
from rltrain.data.experience import Experience
from rltrain.roles.actor import AdvantageEstimation
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config

KL = {"coef": 0.2, "estimator": "k1", "where": "reward"}
ADAPTIVE = KL | {"adaptive": {"target": 0.1, "horizon": 40}}


def estimation_of(kl_coef: float | None = None, **sections: object) -> AdvantageEstimation:
    response = {"sampling": {"max_response_tokens": 8}}
    return AdvantageEstimation(algorithm_of(make_config(rollout=response, **sections)), kl_coef)


def scored(*lengths: int, truncated: tuple[int, ...] = (), kl: float = 0.0) -> Experience:
    """Two samples to a group, each with a prompt of one token, and its place as its reward."""
    experience = packed_experience([(1, length) for length in lengths])
    return experience.with_fields(
        rewards=torch.arange(len(lengths)).float(),
        truncated=torch.tensor([place in truncated for place in range(len(lengths))]),
        reference_logprobs=experience.actor_logprobs - kl,
    )


def twice(values: torch.Tensor) -> torch.Tensor:
    """Over two replicas that have the same."""
    return 2 * values


def no_collective(values: torch.Tensor) -> torch.Tensor:
    pytest.fail("a collective for nothing")


def chunks(estimation: AdvantageEstimation, *parts: Experience) -> list[Experience]:
    estimation.begin_step()
    return [estimation.with_advantages(estimation.shaped(part)) for part in parts]


def test_without_shaping_nothing_is_asked_of_others_and_rewards_stay() -> None:
    estimation = estimation_of(advantages={"normalize_std": False})
    [found] = chunks(estimation, scored(2, 2))
    assert found.rewards.tolist() == [0.0, 1.0]
    assert found.advantages.tolist() == [0, -0.5, -0.5, 0, 0.5, 0.5]
    assert estimation.end_step(no_collective) == {}


def test_overlong_responses_are_penalised_before_they_are_compared() -> None:
    penalty = {"buffer_tokens": 4, "factor": 2.0}
    estimation = estimation_of(advantages={"normalize_std": False, "overlong_penalty": penalty})
    first, _ = chunks(estimation, scored(4, 8), scored(5, 1))
    assert first.rewards.tolist() == [0.0, 1.0 - 2.0]
    assert first.advantages[first.response_mask].tolist() == [0.5] * 4 + [-0.5] * 8
    assert estimation.end_step(twice) == {"overlong_samples": 4, "overlong_penalty": pytest.approx(-2.5 / 4)}


def test_truncated_samples_are_compared_with_and_not_trained_on() -> None:
    estimation = estimation_of(advantages={"normalize_std": False, "mask_truncated": True})
    [found] = chunks(estimation, scored(2, 2, truncated=(1,)))
    assert found.response_mask.tolist() == [False, True, True, False, False, False]
    assert found.advantages[found.response_mask].tolist() == [-0.5, -0.5]
    assert estimation.end_step(twice) == {"masked_truncated": 2}


@pytest.mark.parametrize("kl", [0.1, 0.15, -1.0])
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
    replicas = [estimation_of(loss={"kl": ADAPTIVE}) for _ in parts]
    sent: list[torch.Tensor] = []
    for replica, part in zip(replicas, parts, strict=True):
        chunks(replica, part)
        replica.end_step(lambda values: sent.append(values) or values)  # type: ignore[func-returns-value]
    total: Callable[[torch.Tensor], torch.Tensor] = lambda _: sum(sent[1:], sent[0])  # noqa: E731
    both = [estimation_of(loss={"kl": ADAPTIVE}) for _ in parts]
    for replica, part in zip(both, parts, strict=True):
        chunks(replica, part)
        assert replica.end_step(total)["reward_kl"] == pytest.approx((0.3 + 0.05) / 2, rel=1e-5)
    assert both[0].kl.coef == both[1].kl.coef
