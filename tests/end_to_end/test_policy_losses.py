"""Every policy loss and every kind of off-policy correction trains the quickstart's model."""

import math

import pytest

from tests.support.jobs import QUICKSTART, REPOSITORY, column, train_each

pytestmark = pytest.mark.slow

ONE_RANK = ("placement={'actor, reference, rollout, reward': 0}", "actor.parallel.tp=1", "data.eval=null", "steps=2")
SMALL = "batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 2}"
OF_SEQUENCES = "normalization: sequence_mean"
OWN = f"{REPOSITORY}/tests/support/user_learning.py:"
LOSSES = {
    "clip": "dual_clip: 3.0, correction: {level: geometric, high: 2.0}",
    "gspo": f"{OF_SEQUENCES}, correction: {{method: mis, level: sequence, low: 0.5, high: 2.0, normalize: step}}",
    "cispo": "clip_low: 1.0, clip_high: 4.0, correction: {method: icepop, low: 0.5, high: 5.0}",
    "sapo": "correction: {method: mask, high: 2.0, reject_above: 0.01}",
    "clip_cov": "clip_high: 0.28, clip_cov: {low: 0.01}, correction: {opsm_delta: 0.1}",
    "kl_cov": "kl_cov: {ratio: 0.02}, kl: {coef: 0.05, unbiased: true}",
    "dppo": "dppo: {divergence: kl, ratio_max: 3.0}",
    "reinforce": "correction: {high: 2.0, normalize: mini_batch, masks: [{level: geometric, low: 0.8, high: 1.25}]}",
    "own": f"function: {OWN}clipped",
    "geometric_mean": f"{OF_SEQUENCES}, clip_low: 0.4, clip_high: 0.4, correction: {{high: 2.0}}",
}


@pytest.fixture(scope="module")
def runs(warm_start: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Returns the records of one run per loss, made in one process. reinforce weighs the actor against the engine."""
    jobs = {}
    for policy, chosen in LOSSES.items():
        old = "rollout" if policy == "reinforce" else "actor"
        loss = f"loss={{policy: {policy}, old_logprobs: {old}, {chosen}}}"
        jobs[policy] = [*warm_start[:2], *ONE_RANK, SMALL, loss]
    return train_each(QUICKSTART, jobs, tmp_path_factory.mktemp("policy_losses"), num_ranks=1)


@pytest.mark.parametrize("policy", LOSSES)
def test_a_policy_loss_trains(runs: dict[str, list[dict[str, float]]], policy: str) -> None:
    """Makes two steps of two updates. The engine has the same weights, so nothing is far off or rejected."""
    records = runs[policy]
    norms = column(records, "train/grad_norm")
    assert len(norms) == 2 and all(0 < norm < math.inf for norm in norms)
    assert max(column(records, "train/ratio_max")) < 3, "the policy leaves the one that generated the samples"
    assert max(column(records, "train/rejected_tokens"), default=0) == 0
    assert min(column(records, "train/ess"), default=1) > 0.99
