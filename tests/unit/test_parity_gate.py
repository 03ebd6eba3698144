"""Trainer and engine are compared on tokens of equal weights, and a run ends, or warns, when they are too far apart."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.algorithms.losses import LossOutput, sample_shares, token_weights
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config.schema import Checks, Loss
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, ParityError
from rltrain.planning.validation import check_config
from rltrain.roles.actor import ParityGate, measuring_parity, summarize_parity
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import NO_EVALUATION, make_config

SHAPE = [(3, 5), (2, 0), (4, 9), (1, 7)]


def no_loss(experience: Experience, logprobs: Tensor, entropy: Tensor) -> LossOutput:
    return LossOutput(logprobs.sum(), entropy.sum(), token_sums={"entropy": entropy.sum()})


def measured(experience: Experience, logprobs: Tensor, step: int) -> dict[str, float]:
    """As a step's metrics, which are means over all response tokens, have it."""
    output = measuring_parity(no_loss, step)(experience, logprobs, logprobs)
    num_tokens = float(experience.response_mask.sum())
    return summarize_parity({name: float(value) / (num_tokens or 1) for name, value in output.token_sums.items()})


@pytest.mark.parametrize("step", range(6))
def test_only_tokens_of_the_steps_own_weights_count(step: int) -> None:
    experience = packed_experience(SHAPE, seed=step)
    logprobs = torch.where(experience.response_mask, -torch.rand(experience.num_tokens), torch.tensor(math.nan))
    fresh = experience.response_mask & (experience.policy_version == step)
    found = measured(experience, logprobs, step)
    drawn, trained = experience.rollout_logprobs[fresh].double(), logprobs[fresh].double()
    assert found["fresh_tokens"] == pytest.approx(float(fresh.sum() / experience.response_mask.sum()))
    assert found["fresh_logprob_abs_diff"] == pytest.approx(float((trained - drawn).abs().mean()), rel=1e-5)
    ratio = (trained - drawn).exp()
    assert found["fresh_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-4)
    assert "entropy" in found


def test_without_such_tokens_nothing_is_said() -> None:
    experience = packed_experience(SHAPE)
    assert measured(experience, experience.actor_logprobs, step=7).keys() == {"fresh_tokens", "entropy"}
    empty = experience.select(torch.zeros(0, dtype=torch.int64))
    assert measured(empty, torch.zeros(0), step=0)["fresh_tokens"] == 0


def test_samples_count_for_as_much_as_in_the_loss_that_is_measured() -> None:
    """Losses that routers add are divided by the same divisor."""
    experience = packed_experience(SHAPE)
    for normalization in ("token_mean", "sequence_mean", "dr_grpo"):
        loss = policy_loss(Loss(normalization=normalization), 9)
        found = sample_shares(measuring_parity(loss, 0), experience)
        assert found.tolist() == sample_shares(loss, experience).tolist()
        assert found.sum() == token_weights(experience, normalization, 9).divisor


def gate(**checks: Any) -> ParityGate:
    return ParityGate(Checks(**checks), speaks=True, pause=no_pause)


def no_pause(reason: str) -> None:
    raise AssertionError(f"paused: {reason}")


@pytest.mark.parametrize("value", [0.2, math.nan, math.inf])
@pytest.mark.parametrize(
    "key, metric", [("max_logprob_diff", "fresh_logprob_abs_diff"), ("max_kl", "fresh_kl")], ids=["difference", "kl"]
)
def test_beyond_a_limit_the_run_ends_with_step_value_limit_and_key(key: str, metric: str, value: float) -> None:
    with pytest.raises(
        ParityError, match=rf"^step 12: .*: train/{metric} is {value:.3g}, checks\.{key} 0\.1\..*tools/parity.py"
    ):
        gate(**{key: 0.1}).check(12, {metric: value})


def test_within_limits_and_without_fresh_tokens_it_goes_on() -> None:
    for metrics in ({"fresh_kl": 0.1, "fresh_logprob_abs_diff": 5.0}, {}):
        gate(max_kl=0.1).check(3, metrics)


def test_a_warning_comes_from_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    for speaks in (True, False):
        ParityGate(Checks(max_kl=0.1, action="warn"), speaks=speaks, pause=no_pause).check(4, {"fresh_kl": 0.3})
    (message,) = caplog.messages
    assert caplog.records[0].levelno == logging.WARNING
    assert message.startswith("step 4: ") and "train/fresh_kl is 0.3, checks.max_kl 0.1" in message


@pytest.mark.parametrize("speaks", [True, False])
def test_every_rank_of_the_actor_asks_for_the_pause(speaks: bool) -> None:
    """So that none of them comes to the end of the step before it is asked for."""
    reasons: list[str] = []
    found = ParityGate(Checks(max_kl=0.1, action="pause"), speaks=speaks, pause=reasons.append)
    found.check(3, {"fresh_kl": 0.1})
    assert not reasons
    found.check(4, {"fresh_kl": 0.3})
    (reason,) = reasons
    assert reason.startswith("step 4: ") and "train/fresh_kl is 0.3, checks.max_kl 0.1 (checks.action pause)" in reason


def test_a_pause_needs_checkpoints() -> None:
    checks = {"max_kl": 0.1, "action": "pause"}
    with pytest.raises(ConfigError, match=r"checks\.action: got pause with checkpoint\.save_interval 0 and"):
        check_config(make_config(checks=checks))
    for key in ("save_interval", "save_every_s"):
        check_config(make_config(checks=checks, checkpoint={"save_every_s": 0, key: 10}))


def test_limits_on_what_no_engine_drew_are_refused() -> None:
    config = make_config(algorithm="sft", placement={"actor": 0}, **NO_EVALUATION, checks={"max_kl": 0.1})
    with pytest.raises(ConfigError, match=r"checks\.max_kl: got 0\.1 with algorithm sft, which trains on what no"):
        check_config(config)
