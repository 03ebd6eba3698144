"""What has no meaning together in the policy loss is refused with the key, the reason, and what is expected."""

from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.planning.doubts import doubts
from rltrain.planning.validation import check_config
from tests.unit.schedule_configs import NO_EVALUATION, PPO, make_config, place

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a policy loss of an algorithm without one": (
        {"algorithm": "sft", "placement": {"actor": 0}, **NO_EVALUATION, "loss": {"policy": "gspo"}},
        "loss.policy: got gspo with algorithm sft, which learns from no samples of its own",
    ),
    "a second clip of what has no first": (
        {"loss": {"policy": "cispo", "dual_clip": 3.0}},
        "loss.dual_clip: got 3.0 with loss.policy cispo; expected null",
    ),
    "one ratio where every token has an advantage": (
        {"algorithm": "ppo", "placement": PPO, "loss": {"policy": "geometric_mean"}},
        "loss.policy: got geometric_mean with algorithm ppo, whose tokens have advantages of their own",
    ),
    "one ratio where a token is as good as what comes of it": (
        {"algorithm": "reinforce_plus_plus", "loss": {"policy": "geometric_mean"}},
        "loss.policy: got geometric_mean with algorithm reinforce_plus_plus, whose tokens have advantages of their own",
    ),
    "covariances between nothing": (
        {"loss": {"policy": "clip_cov", "clip_cov": {"low": 5.0}}},
        "loss.clip_cov.low: got 5.0 with loss.clip_cov.high 5.0; expected less",
    ),
    "a method without its bound": (
        {"loss": {"correction": {"method": "icepop"}}},
        "loss.correction.method: got icepop without loss.correction.high; expected an upper bound of the ratio",
    ),
    "a level without a bound": (
        {"loss": {"correction": {"level": "sequence"}}},
        "loss.correction.level: got sequence without loss.correction.high",
    ),
    "a lower bound alone": (
        {"loss": {"correction": {"low": 0.5}}},
        "loss.correction.low: got 0.5 without loss.correction.high",
    ),
    "bounds in the wrong order": (
        {"loss": {"correction": {"method": "mis", "low": 2.0, "high": 0.5}}},
        "loss.correction.low: got 2.0 with loss.correction.high 0.5; expected less",
    ),
    "weights against the engine's log-probs without the actor's": (
        {"loss": {"old_logprobs": "rollout", "correction": {"high": 2.0}}},
        "loss.correction.high: got 2.0 with loss.old_logprobs rollout and loss.correction.method tis; expected "
        "loss.old_logprobs: actor",
    ),
    "a policy loss of one's own that is not named": (
        {"loss": {"policy": "own"}},
        'loss.function: got None with loss.policy own; expected "file.py:function" or "module:function"',
    ),
    "a function that nothing calls": (
        {"loss": {"function": "a.py:b"}},
        "loss.function: got a.py:b with loss.policy clip; expected null",
    ),
    "a mean of no weights": (
        {"loss": {"correction": {"normalize": "step"}}},
        "loss.correction.normalize: got step without loss.correction.high",
    ),
    "a mean of weights that are 1": (
        {"loss": {"correction": {"method": "mask", "high": 2.0, "normalize": "step"}}},
        "loss.correction.normalize: got step with loss.correction.method mask, whose weights are all 1",
    ),
    "a step's mean of weights that its mini-batches change": (
        {
            "loss": {
                "policy": "reinforce",
                "old_logprobs": "rollout",
                "correction": {"high": 2.0, "normalize": "step"},
            }
        },
        "loss.correction.normalize: got step with loss.old_logprobs rollout; expected mini_batch",
    ),
    "nothing to reject": (
        {"loss": {"correction": {"high": 2.0, "rejected": "weight_0"}}},
        "loss.correction.rejected: got weight_0 without loss.correction.masks or reject_above; expected left_out",
    ),
    "a mask that leaves nothing in": (
        {"loss": {"correction": {"masks": [{"level": "geometric", "low": 1.1, "high": 1.01}]}}},
        "loss.correction.masks.0.low: got 1.1 with high 1.01; expected less",
    ),
    "an estimator of nothing": (
        {"loss": {"correction": {"reject_by": "k1"}}},
        "loss.correction.reject_by: got k1 without loss.correction.reject_above",
    ),
    "an unbiased reward": (
        {"loss": {"kl": {"coef": 0.1, "where": "reward", "unbiased": True}}},
        "loss.kl.unbiased: got true with loss.kl.where reward; expected loss.kl.where: loss",
    ),
    "an unbiased estimate that is none": (
        {"loss": {"kl": {"coef": 0.1, "estimator": "k2", "unbiased": True}}},
        "loss.kl.unbiased: got true with loss.kl.estimator k2, whose mean is not the KL",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_with_its_reason(case: str) -> None:
    sections, reason = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        check_config(make_config(**sections))
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    "loss",
    [
        {"dual_clip": 3.0},
        {"policy": "gspo", "correction": {"method": "mis", "level": "sequence", "low": 0.5, "high": 2.0}},
        {"old_logprobs": "rollout", "correction": {"method": "mask", "low": 0.5, "high": 2.0, "reject_above": 0.01}},
        {"policy": "reinforce", "old_logprobs": "rollout", "correction": {"method": "icepop", "high": 1.2}},
        {"old_logprobs": "rollout", "correction": {"opsm_delta": 0.1}, "kl": {"coef": 0.1, "unbiased": True}},
    ],
    ids=str,
)
def test_what_has_a_meaning_is_accepted(loss: dict[str, Any]) -> None:
    check_config(make_config(loss=loss))


def test_sequences_that_count_by_their_length_are_doubted() -> None:
    def doubted(**loss: Any) -> list[str]:
        config = make_config(loss=loss)
        return [doubt for doubt in doubts(config, place(config.placement)) if doubt.startswith("loss.")]

    (doubt,) = doubted(policy="gspo")
    assert doubt.startswith("loss.normalization: got token_mean with loss.policy gspo")
    assert doubted(policy="gspo", normalization="sequence_mean") == []
